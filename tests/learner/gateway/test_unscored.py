"""What becomes of samples without a score: a stated fallback, and the end of a run that gets too few scores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.status import lines
from learner.config import FilterConfig
from learner.gateway import unscored
from learner.gateway.trajectories import with_fallback
from learner.gateway.unscored import WINDOW, UnscoredShare
from protos.arrays import pack_ids
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway.gateway_harness import Actor, config_in, running, sample
from tests.learner.gateway.test_gateway_batches import begun

LEASE = learner_pb2.Lease(group_id="g00000003", prompt_ids=pack_ids([4, 6]))


def noted(*runs: tuple[str, int], most: float | None = 0.5) -> str:
    share = UnscoredShare(most=most)
    for reason, count in runs:
        for _ in range(count):
            share.note(reason)
    return share.words


def test_a_run_stops_when_more_than_the_share_of_the_newest_samples_came_without_a_score() -> None:
    # faults.md 106: half of 512 is 256
    assert WINDOW == 512
    assert noted(("unscored_error", 511)) == ""  # too few to say
    assert noted(("", 256), ("unscored_error", 256)) == ""
    words = noted(("", 255), ("unscored_error", 200), ("unscored_timeout", 57))
    assert words.startswith("257 of the last 512 samples came without a score (unscored_error: 200, unscored_timeout: 57), more than filter.max_unscored_share=0.5;")
    assert noted(("unscored_error", 512), ("", 256)) == ""  # the bad ones are long ago
    assert "; see to the scorer and the reward servers' logs, then" in words
    words = noted(("", 200), ("unscored_error", 12), ("environment_error", 300))
    assert "(environment_error: 300, unscored_error: 12)" in words and "; see to the scorer and the reward servers' logs and the environment or agent and the rollout servers' logs, then" in words
    assert noted(("unscored_error", 512), most=None) == ""


def test_a_fallback_is_the_reward_of_an_unscored_sample_and_says_so_in_its_parts() -> None:
    bad, good = sample(LEASE, 0, 1, reward=None), sample(LEASE, 1, 1, reward=0.5)
    assert with_fallback(bad, -1.0) == "unscored_timeout" and with_fallback(good, -1.0) == ""
    assert (bad.reward.score.value, dict(bad.reward.score.parts)) == (-1.0, {"unscored_timeout": 1.0})
    assert (good.reward.score.value, dict(good.reward.score.parts)) == (0.5, {})


@pytest.mark.parametrize("given", [{"unscored": "fallback"}, {"unscored_value": 0.0}, {"unscored": "drop_group", "unscored_value": 0.0}])
def test_a_fallback_and_its_value_belong_together(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belong together"):
        FilterConfig.model_validate(given)


async def test_a_sample_that_fell_back_is_trained_on_and_counted_with_its_reason(tmp_path: Path) -> None:
    config = config_in(tmp_path, filter={"unscored": "fallback", "unscored_value": -1.0})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        for lease in await actor.lease(max_groups=2):
            await actor.submit(sample(lease, 0, 1), sample(lease, 1, 1, reward=None))
        header, _ = await trainer.take(0)
        assert sorted(row.reward for row in header.table) == [-1.0, -1.0, 1.0, 1.0] and all(row.usable for row in header.table)
        status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest())
        assert dict(status.num_unusable) == {"unscored_timeout_fallback": 2}
        assert "unusable samples since the gateway started: unscored_timeout_fallback 2" in lines(status)
        await actor.leave()


async def test_the_run_ends_with_a_message_when_most_samples_come_without_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 106
    monkeypatch.setattr(unscored, "WINDOW", 4)
    config = config_in(tmp_path, filter={"max_unscored_share": 0.5, "min_usable": 1})
    async with running(config) as gateway:
        address = f"127.0.0.1:{gateway.port}"
        trainer, actor = await begun(address, tmp_path), Actor(address, config)
        await actor.attend()
        first, second = await actor.lease(max_groups=2)
        await actor.submit(sample(first, 0, 1), sample(first, 1, 1, reward=None))
        await actor.submit(*(sample(second, index, 1, reward=None) for index in range(2)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(trainer.take(0), 20)
        assert caught.value.code() == grpc.StatusCode.ABORTED and "3 of the last 4 samples came without a score (unscored_timeout: 3)" in str(caught.value.details())
        await actor.leave()
