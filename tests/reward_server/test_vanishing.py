"""Callers that send much and go, at any moment: nothing of theirs is left, and the next caller is served."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import grpc

from protos import rpc
from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from tests.reward_server.conftest import request, serving, spec

NUM_CALLERS = 24


async def vanish(address: str, kind: int, stay_s: float) -> None:
    """One caller: a stream, a stream of batches, or a group; it goes after so long, by its call's end or with its whole connection."""
    async with rpc.channel(address) as channel:
        stub = RewardServiceStub(channel)
        requests = [request(number, "30" if number % 7 else "raise", scorer="waits") for number in range(400)]
        call: grpc.aio.Call
        if kind % 3 == 0:
            call = stub.Score(iter(requests), timeout=60)
        elif kind % 3 == 1:
            call = stub.ScoreBatch(iter([pb.ScoreBatchRequest(requests=requests)]), timeout=60)
        else:
            call = stub.ScoreGroup(pb.ScoreGroupRequest(scorer="waits", completions=["30"] * 400), timeout=60)
        await asyncio.sleep(stay_s)
        if kind % 2:
            call.cancel()
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await asyncio.wait_for(call.code(), 0.001)


async def test_callers_that_vanish_leave_nothing_behind_and_the_next_one_is_served() -> None:
    draw = random.Random(5)
    async with serving(spec("one"), spec("waits", limit_s=60.0), max_pending=128, workers=2) as (address, servicer):
        stays_s = [draw.choice([0.0, 0.01, 0.1, 0.4]) for _ in range(NUM_CALLERS)]
        gone = await asyncio.gather(*(vanish(address, kind, stay_s) for kind, stay_s in enumerate(stays_s)), return_exceptions=True)
        assert [each for each in gone if isinstance(each, Exception) and not isinstance(each, TimeoutError)] == []
        async with asyncio.timeout(20):
            while servicer.num_pending or not servicer._plane.at_work.is_idle():  # of calls that would take half a minute
                await asyncio.sleep(0.02)
        async with rpc.channel(address) as channel:
            stub = RewardServiceStub(channel)
            answer = await stub.ScoreGroup(pb.ScoreGroupRequest(scorer="one", completions=["x"] * 3000), timeout=40)
            assert [each.score.value for each in answer.rewards] == [1.0] * 3000
            batch = pb.ScoreBatchRequest(requests=[request(number, scorer="one") for number in range(5000)])
            ids = [each.id async for message in stub.ScoreBatch(iter([batch]), timeout=40) for each in message.responses]
            assert sorted(map(int, ids)) == list(range(5000))
        assert servicer.num_pending == 0
