"""Samples of one group that are scored together: each waits until all are drawn, then one call scores them.

A group of which a sample is lost (drained, failed) is given up: those that wait end without being submitted, and the learner
leases the group again. Of a group that was submitted in part before, the rest cannot be compared any more and is unscored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2, reward_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

logger = logging.getLogger("headrace.rollout.together")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
Rewards = tuple[Sequence[trajectory_pb2.Reward], float]  # one for each completion, and wall seconds


class Together:
    """Example: `Together(8, done=(), score=score)`; each sample awaits `reward(index, text)`, and `ended(index)` is told of every sample's end."""

    def __init__(self, size: int, *, done: Collection[int], score: Callable[[list[str]], Awaitable[Rewards]]) -> None:
        self._size = size
        self._done = sorted(done)
        self._score = score
        self._texts: dict[int, str] = {}
        self._scored: asyncio.Future[Rewards | None] = asyncio.get_running_loop().create_future()

    async def reward(self, index: int, text: str) -> tuple[trajectory_pb2.Reward, float] | None:
        """The sample's reward and the seconds of the call; None: the group was given up."""
        if self._done:
            words = f"samples {self._done} of its group of {self._size} were scored and submitted before; the rest cannot be compared with them"
            return trajectory_pb2.Reward(unscored=trajectory_pb2.Unscored(reason=trajectory_pb2.UNSCORED_REASON_REFUSED, detail=words)), 0.0
        self._texts[index] = text
        if len(self._texts) == self._size and not self._scored.done():
            await self._score_all()
        rewards = await asyncio.shield(self._scored)
        return None if rewards is None else (rewards[0][index], rewards[1])

    def ended(self, index: int) -> None:
        """A sample's task is over. One that had no text gives the group up."""
        if index not in self._texts and not self._scored.done():
            self._scored.set_result(None)

    async def _score_all(self) -> None:
        try:
            rewards = await self._score([self._texts[index] for index in range(self._size)])
        except BaseException:
            self._scored.cancel()
            raise
        self._scored.set_result(rewards)


class GroupScoring:
    """Client of ScoreGroup: any of several servers, the next one when one is away."""

    def __init__(self, addresses: Sequence[str], *, timeout_s: float, security: rpc.Security = rpc.OPEN) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._security = security
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turn = 0

    async def score(self, *, scorer: str, prompt: str, completions: list[str], fields: Any) -> Rewards:
        """Never raises for a scorer's or a server's failure: samples are unscored then, with TIMEOUT or UNAVAILABLE."""
        request = reward_pb2.ScoreGroupRequest(scorer=scorer, prompt=prompt, completions=completions, fields=fields)
        start_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                rewards = await self._ask(request)
        except TimeoutError:
            rewards = self._unscored(len(completions), trajectory_pb2.UNSCORED_REASON_TIMEOUT, f"no answer for the group within {self._timeout_s} s ({', '.join(self._addresses)})")
        except grpc.aio.AioRpcError as error:
            rewards = self._unscored(len(completions), trajectory_pb2.UNSCORED_REASON_REFUSED, f"{error.code().name}: {error.details()}")
        return rewards, time.monotonic() - start_s

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def _ask(self, request: reward_pb2.ScoreGroupRequest) -> Sequence[trajectory_pb2.Reward]:
        """Until a server answers. Raises AioRpcError for what another server would say, too."""
        wait_s = _FIRST_WAIT_S
        while True:
            address = self._addresses[self._turn % len(self._addresses)]
            self._turn += 1
            try:
                stub = reward_pb2_grpc.RewardServiceStub(self._channel(address))
                answer = await stub.ScoreGroup(request, timeout=rpc.deadline_s("ScoreGroup"))
                return list(answer.rewards)
            except grpc.aio.AioRpcError as error:
                if not rpc.is_transient(error):
                    raise
                logger.warning("reward server %s: %s %s", address, error.code().name, error.details())
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = rpc.channel(address, self._security)
        return self._channels[address]

    def _unscored(self, count: int, reason: trajectory_pb2.UnscoredReason, detail: str) -> list[trajectory_pb2.Reward]:
        return [trajectory_pb2.Reward(unscored=trajectory_pb2.Unscored(reason=reason, detail=detail)) for _ in range(count)]
