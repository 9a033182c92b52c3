"""Samples of a group that are scored together: all or none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos.trajectory.v1alpha1 import trajectory_pb2 as pb
from rollout_server.together import GroupScoring, Rewards, Together
from tests.rollout_server.conftest import Start
from tests.rollout_server.fakes import FakeLearner, FakeReward, a_lease
from tests.rollout_server.test_actor import at, identities


async def places(completions: list[str]) -> Rewards:
    """Each text's place in the alphabet of the group."""
    return [pb.Reward(score=pb.Score(value=float(sorted(completions).index(each)))) for each in completions], 0.5


async def test_every_sample_waits_for_all_and_gets_its_own_reward() -> None:
    together = Together(3, done=(), score=places)
    first, third = asyncio.create_task(together.reward(0, "c")), asyncio.create_task(together.reward(2, "a"))
    await asyncio.sleep(0.01)
    assert not first.done() and not third.done()
    second = await together.reward(1, "b")
    answers = [await first, second, await third]
    assert [each and each[0].score.value for each in answers] == [2.0, 1.0, 0.0]
    for index in range(3):
        together.ended(index)  # changes nothing any more


async def test_a_lost_sample_gives_the_group_up_and_nobody_waits_for_ever() -> None:
    together = Together(2, done=(), score=places)
    waiting = asyncio.create_task(together.reward(0, "a"))
    await asyncio.sleep(0.01)
    together.ended(1)
    assert await asyncio.wait_for(waiting, 20) is None


async def test_the_rest_of_a_group_that_was_submitted_in_part_is_unscored_and_not_compared() -> None:
    together = Together(3, done=(1,), score=places)
    answer = await together.reward(0, "a")
    assert answer is not None and answer[0].unscored.reason == pb.UNSCORED_REASON_REFUSED and "[1] of its group of 3" in answer[0].unscored.detail


async def test_a_scorer_that_raises_ends_every_sample_of_the_group() -> None:
    async def raises(completions: list[str]) -> Rewards:
        raise KeyError("defect")

    together = Together(2, done=(), score=raises)
    waiting = asyncio.create_task(together.reward(0, "a"))
    await asyncio.sleep(0.01)
    with pytest.raises(KeyError):
        await together.reward(1, "b")
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_group_goes_to_the_next_server_when_one_is_away_and_is_unscored_when_none_answers() -> None:
    away, there = FakeReward(), FakeReward()
    addresses = [await away.start(), await there.start()]
    await away.stop()
    client = GroupScoring(addresses, timeout_s=10)
    rewards, _ = await client.score(scorer="s", prompt="p", completions=["a", "b"], fields=None)
    assert [reward.score.value for reward in rewards] == [0.0, 1.0] and there.groups[0].scorer == "s"
    there.silent = True
    late = GroupScoring(addresses[1:], timeout_s=0.3)
    rewards, _ = await late.score(scorer="s", prompt="p", completions=["a", "b"], fields=None)
    assert [reward.unscored.reason for reward in rewards] == [pb.UNSCORED_REASON_TIMEOUT] * 2
    await client.close()
    await late.close()
    await there.stop()


async def test_an_actor_sends_a_whole_group_once_all_of_it_is_drawn(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path) -> None:
    learner.publish(1, tiny_model)
    await learner.lend(a_lease(0, group_size=3), a_lease(1, group_size=2))
    await start(**at(learner, reward), score_groups=True)
    await learner.until(lambda: len(learner.submitted) == 5)
    assert identities(learner) == [("g0", 0), ("g0", 1), ("g0", 2), ("g1", 0), ("g1", 1)]
    assert all(each.reward.score.value == each.sample_index for each in learner.submitted)
    assert sorted(len(group.completions) for group in reward.groups) == [2, 3] and not reward.requests
    texts = {(each.group_id, each.sample_index): each.text for each in learner.submitted}
    assert sorted(list(group.completions) for group in reward.groups) == sorted([[texts["g0", i] for i in range(3)], [texts["g1", i] for i in range(2)]])
