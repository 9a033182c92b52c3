"""The admitted staleness moves with the mismatch that the trainer sends; a group keeps what it was opened under."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from learner.config import LearnerConfig
from learner.gateway.ledger import Ledger
from learner.gateway.terms import Adaptive
from protos.learner.v1alpha1 import feed_pb2, learner_pb2
from tests.learner.gateway import scenes
from tests.learner.gateway.gateway_harness import Actor, Trainer, config_in, snapshot_in
from tests.learner.gateway.test_ledger import completed, opened, started

MOVES = {"lowest": 0, "highest": 2, "low": 0.01, "high": 0.05}


def moving() -> Ledger:
    """P = 1, S from 0 to 2, 1 at first."""
    return started(groups_per_step=1, adaptive=Adaptive(**MOVES))  # type: ignore[arg-type]


def stepped(ledger: Ledger, mismatch: float | None) -> int:
    """One step with the oldest group; the bound after it."""
    published = ledger.published
    assert published is not None
    if not ledger.account.waiting:
        completed(ledger, opened(ledger)[0], version=published.number)
    assert ledger.form(ledger.step)[0] is not None
    ledger.publish(ledger.step + 1, mismatch=mismatch)
    return ledger.bound


def test_the_bound_moves_by_one_within_its_limits_and_rests_in_between() -> None:
    ledger = moving()
    assert [stepped(ledger, m) for m in (0.005, 0.0, 0.03, None, 0.06, math.nan, math.inf)] == [2, 2, 2, 2, 1, 0, 0]


def test_room_follows_it_and_what_is_open_stays() -> None:
    ledger = moving()
    names = opened(ledger, 2)  # (1 + 1) * 1
    assert ledger.room() == 0
    for name in names:
        completed(ledger, name)
    assert stepped(ledger, 0.9) == 0 and ledger.room() == 0 and ledger.max_open == 1
    assert ledger.bound_of(1) == 1  # trained in step 1 by policy 0: 1 step old, while the bound is 0
    plan, _ = ledger.form(1)
    assert plan is not None and plan.tokens == ((1, 4),)


def test_a_rollback_brings_the_cuts_bound_back() -> None:
    ledger = moving()
    assert [stepped(ledger, 0.9), stepped(ledger, 0.0), stepped(ledger, 0.0)] == [0, 1, 2]
    ledger.rollback(1)
    ledger.publish(1)
    assert ledger.bound == 0 and ledger.account.bounds == {0: 1, 1: 0}


def test_a_cut_forgets_older_bounds_and_not_the_present_one() -> None:
    ledger = moving()
    assert [stepped(ledger, 0.9), stepped(ledger, 0.0)] == [0, 1]
    ledger.cover(2)
    assert ledger.account.bounds == {2: 1} and ledger.bound == 1


@pytest.mark.parametrize(
    ("staleness", "words"),
    [
        ({"adaptive": {**MOVES, "lowest": 2}}, "nothing could change"),
        ({"adaptive": {**MOVES, "low": 0.05}}, "would never rest"),
        ({"max_staleness": 3, "adaptive": MOVES}, "max_staleness=3 is outside adaptive.lowest=0 to highest=2"),
        ({"max_staleness": 2, "window": 2, "adaptive": MOVES}, r"window=2 is more than adaptive.lowest \* groups_per_step \+ 1 = 1"),
        ({"adaptive": {**MOVES, "metric": "ess"}}, "metric"),
    ],
)
def test_limits_that_contradict_are_refused(staleness: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": {"prompts": "p"}, "staleness": staleness})


async def closed(trainer: Trainer, step: int, mismatch: float | None) -> None:
    folder = snapshot_in(trainer.snapshots / f"{trainer.incarnation}-{step}", [b"weights!"])
    await trainer.stub.CloseBatch(feed_pb2.CloseBatchRequest(incarnation=trainer.incarnation, policy_step=step, snapshot_dir=str(folder), mismatch=mismatch))


async def seen(actor: Actor) -> tuple[int, int]:
    status = await actor.stub.GetStatus(learner_pb2.GetStatusRequest())
    return status.max_staleness, status.max_open


async def test_the_trainers_mismatch_moves_what_status_and_the_next_batch_say(tmp_path: Path) -> None:
    config = config_in(tmp_path, staleness={"max_staleness": 1, "adaptive": MOVES})
    async with scenes.begun(config, tmp_path) as at:
        assert await seen(at.actor) == (1, 4)
        await at.sample(4)
        await at.trainer.take(0)
        await closed(at.trainer, 1, 0.001)
        assert await seen(at.actor) == (2, 6)
        header, _ = await at.trainer.take(1)
        assert header.stats.staleness_bound == 2
        await closed(at.trainer, 2, None)
        assert await seen(at.actor) == (2, 6)
