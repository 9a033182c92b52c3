"""Scores the lines of a file at a reward server that runs: what `headrace reward try --server` shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from deploy.mistakes import Mistakes
from deploy.reward_try import AT_ONCE, Line, Row
from deploy.status import unanswered
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.rpc import Security, channel, deadline_s
from reward_server.wire import from_proto


async def asked(address: str, security: Security, lines: Sequence[Line], only: Sequence[str]) -> tuple[list[str], list[Row]]:
    """Names of the scorers asked (all that the server has, or `only` these), and their rows in the order of lines. Raises Mistakes."""
    async with channel(address, security) as open_channel:
        stub = reward_pb2_grpc.RewardServiceStub(open_channel)
        try:
            listed = await stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=deadline_s("ListScorers"))
            known = [each.name for each in listed.scorers]
            if unknown := [name for name in only if name not in known]:
                raise Mistakes([f"--only {unknown[0]}: {address} has the scorers {', '.join(known)}; name one of them"])
            names = list(only) or known
            room = asyncio.Semaphore(AT_ONCE)
            return names, await asyncio.gather(*(_row(stub, room, line, name) for line in lines for name in names))
        except grpc.aio.AioRpcError as error:
            raise Mistakes([unanswered("reward server", address, error, security)]) from None


async def _row(stub: reward_pb2_grpc.RewardServiceStub, room: asyncio.Semaphore, line: Line, name: str) -> Row:
    async with room:
        request = reward_pb2.ScoreGroupRequest(scorer=name, prompt=line.prompt, completions=line.completions)
        request.fields.update(dict(line.fields))
        began_s = time.monotonic()
        answer = await stub.ScoreGroup(request, timeout=deadline_s("ScoreGroup"))
        return Row(line=line, scorer=name, outcomes=tuple(map(from_proto, answer.rewards)), seconds=time.monotonic() - began_s)
