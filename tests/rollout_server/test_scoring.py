from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.struct_pb2 import Struct

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.scoring import Scoring
from tests.rollout_server.fakes import FakeReward


@asynccontextmanager
async def running(*addresses: str, timeout_s: float) -> AsyncIterator[Scoring]:
    scoring = Scoring(addresses, timeout_s=timeout_s)
    task = asyncio.create_task(scoring.run())
    try:
        yield scoring
    finally:
        task.cancel()


async def score(scoring: Scoring, completion: str) -> pb.Reward:
    return (await scoring.score(prompt="p", completion=completion, fields=Struct()))[0]


async def test_answers_find_their_items_across_two_servers() -> None:
    first, second = FakeReward(), FakeReward()
    async with running(await first.start(), await second.start(), timeout_s=5) as scoring:
        rewards = await asyncio.gather(*[score(scoring, "x" * i) for i in range(600)])
        assert [reward.score.value for reward in rewards] == [float(i) for i in range(600)]
    await first.stop()
    await second.stop()


async def test_what_a_dying_server_left_unanswered_goes_to_the_other() -> None:
    mute, speaking = FakeReward(), FakeReward()
    mute.silent = True
    addresses = (await mute.start(), await speaking.start())
    async with running(*addresses, timeout_s=10) as scoring:
        waiting = [asyncio.create_task(score(scoring, "x" * i)) for i in range(20)]
        async with asyncio.timeout(30):
            while not mute.requests:
                waiting.append(asyncio.create_task(score(scoring, "x" * len(waiting))))
                await asyncio.sleep(0.01)
        await mute.stop()
        rewards = await asyncio.gather(*waiting)
        assert [reward.score.value for reward in rewards] == [float(i) for i in range(len(waiting))]
    await speaking.stop()


async def test_without_any_server_a_sample_is_unscored_unavailable_not_zero() -> None:
    async with running("127.0.0.1:1", timeout_s=0.3) as scoring:
        reward = await score(scoring, "x")
    assert reward.WhichOneof("outcome") == "unscored"
    assert reward.unscored.reason == pb.UNSCORED_REASON_UNAVAILABLE and "127.0.0.1:1" in reward.unscored.detail


async def test_a_server_that_comes_later_is_found() -> None:
    server = FakeReward()
    address = await server.start()
    await server.stop()
    async with running(address, timeout_s=10) as scoring:
        waiting = asyncio.create_task(score(scoring, "xyz"))
        await asyncio.sleep(0.3)
        await server.start()
        assert (await waiting).score.value == 3.0
    await server.stop()


async def test_an_item_given_up_leaves_room_for_others() -> None:
    server = FakeReward()
    server.silent = True
    async with running(await server.start(), timeout_s=0.2) as scoring:
        rewards = await asyncio.gather(*[score(scoring, "x") for _ in range(300)])  # more than one server may hold
        assert {reward.unscored.reason for reward in rewards} <= {pb.UNSCORED_REASON_TIMEOUT, pb.UNSCORED_REASON_UNAVAILABLE}
        server.silent = False
        assert (await score(scoring, "xy")).score.value == 2.0
    await server.stop()


async def test_without_a_server_it_waits_and_does_not_end_the_replicas_part_in_the_run() -> None:
    task = asyncio.create_task(Scoring((), timeout_s=1.0).run())
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
