"""Client of the reward plane: one Score stream a server, work pulled by whoever has room.

    score     produces an item, waits for its answer,                   unblocked by the answer or its time limit
    _writer   consumes items, produces requests, waits for an item,     unblocked by a new item or an answer (room)
    _stream   consumes answers, resolves items, waits for the server,   unblocked by its answer or its end

A stream that breaks gives its unanswered items back to the common queue, where the next server takes them. An item that
nobody answers in time is unscored: with TIMEOUT when a server had it, with UNAVAILABLE when none did. It is never 0.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

logger = logging.getLogger("headrace.rollout.scoring")

MAX_PENDING = 256  # items at one server
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


@dataclass(kw_only=True, slots=True, eq=False)
class _Item:
    request: reward_pb2.ScoreRequest
    answer: asyncio.Future[trajectory_pb2.Reward]
    was_sent: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class _Server:
    """One reward server and what it has not answered yet."""

    address: str
    pending: dict[str, _Item] = field(default_factory=dict)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    said_away: bool = False


class Scoring:
    """Scores by any of several servers. `run` keeps the streams; `score` may be called before it and waits."""

    def __init__(self, addresses: Sequence[str], *, timeout_s: float, security: rpc.Security = rpc.OPEN) -> None:
        self._servers = [_Server(address=address) for address in addresses]
        self._timeout_s = timeout_s
        self._security = security
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._serial = itertools.count()
        self.scorer = ""  # the learner names it in its Welcome; empty: the server's default

    async def score(self, *, prompt: str, completion: str, fields: Any) -> tuple[trajectory_pb2.Reward, float]:
        """(reward or why there is none, wall seconds). Never raises for a scorer's or a server's failure."""
        item_id = str(next(self._serial))
        request = reward_pb2.ScoreRequest(id=item_id, scorer=self.scorer, prompt=prompt, completion=completion, fields=fields)
        item = _Item(request=request, answer=asyncio.get_running_loop().create_future())
        start_s = time.monotonic()
        self._queue.put_nowait(item)
        try:
            reward = await asyncio.wait_for(item.answer, self._timeout_s)
        except TimeoutError:
            reward = self._unscored(item)
        finally:
            item.answer.cancel()
            for server in self._servers:
                if server.pending.pop(item_id, None) is not None:
                    server.room.set()
        return reward, time.monotonic() - start_s

    def _unscored(self, item: _Item) -> trajectory_pb2.Reward:
        if item.was_sent:
            reason, detail = trajectory_pb2.UNSCORED_REASON_TIMEOUT, f"no answer within {self._timeout_s} s"
        else:
            addresses = ", ".join(server.address for server in self._servers)
            reason, detail = trajectory_pb2.UNSCORED_REASON_UNAVAILABLE, f"no reward server took it within {self._timeout_s} s ({addresses})"
        return trajectory_pb2.Reward(unscored=trajectory_pb2.Unscored(reason=reason, detail=detail), scorer=self.scorer)

    async def run(self) -> None:
        """Until cancelled, also where there is no server: environments give all rewards then."""
        await asyncio.gather(*[self._keep(server) for server in self._servers])
        await asyncio.Event().wait()

    async def _keep(self, server: _Server) -> None:
        """Opens the stream again and again."""
        wait_s = _FIRST_WAIT_S
        async with rpc.channel(server.address, self._security) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            while True:
                try:
                    await self._connected(channel, server)
                    opened_s = time.monotonic()
                    await self._stream(stub, server)
                except grpc.aio.AioRpcError as error:
                    logger.warning("reward server %s: %s %s", server.address, error.code().name, error.details())
                if time.monotonic() - opened_s > _LONGEST_WAIT_S:
                    wait_s = _FIRST_WAIT_S
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _connected(self, channel: grpc.aio.Channel, server: _Server) -> None:
        """Waits until the server is there; items stay in the common queue meanwhile."""
        try:
            await asyncio.wait_for(channel.channel_ready(), 2.0)
        except TimeoutError:
            if not server.said_away:
                logger.warning("reward server %s is not there yet, waiting for it", server.address)
                server.said_away = True
            await channel.channel_ready()
        if server.said_away:
            logger.info("reward server %s is there", server.address)
            server.said_away = False

    async def _stream(self, stub: Any, server: _Server) -> None:
        """One stream until it ends; what it left unanswered goes back to the queue."""
        call = stub.Score(timeout=rpc.deadline_s("Score"))
        writer = asyncio.create_task(self._writer(call, server))
        try:
            async for response in call:
                item = server.pending.pop(response.id, None)
                server.room.set()
                if item is not None and not item.answer.done():
                    item.answer.set_result(response.reward)
        finally:
            writer.cancel()
            call.cancel()
            left, server.pending = server.pending, {}
            for item in left.values():
                item.was_sent = False
                self._queue.put_nowait(item)

    async def _writer(self, call: Any, server: _Server) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees why the stream ended
            while True:
                while len(server.pending) >= MAX_PENDING:
                    server.room.clear()
                    await server.room.wait()
                item = await self._queue.get()
                if item.answer.done():
                    continue
                server.pending[item.request.id] = item
                await call.write(item.request)
                item.was_sent = True
