"""A group with a greedy answer beside its samples: one sample more that is booked, scored and waited for, and never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from learner.config import LearnerConfig
from learner.gateway.history import Rules
from learner.gateway.ledger import Ledger, Limits
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway import scenes
from tests.learner.gateway.gateway_harness import config_in, running, sample
from tests.learner.gateway.test_ledger import completed, facts, opened, started

REMAX = {"name": "remax"}


def with_baseline(**rules: Any) -> Ledger:
    """P = 1, two samples and the greedy answer, which is number 2."""
    return started(**{"groups_per_step": 1, "baselines": frozenset({""}), "min_usable": 1, **rules})


def test_a_group_is_complete_with_its_greedy_answer_and_not_before() -> None:
    ledger = with_baseline()
    (name,) = opened(ledger)
    assert completed(ledger, name, (0.0, 1.0)).group == "open" and ledger.form(0)[0] is None
    assert ledger.submit(name, 2, facts(1.0)).group == "complete"
    with pytest.raises(ValueError, match="sample_index=3 is outside the group of 3 samples"):
        ledger.submit(name, 3, facts(1.0))


def test_its_tokens_are_in_no_count_and_its_row_says_what_it_is() -> None:
    ledger = with_baseline()
    (name,) = opened(ledger)
    for index, tokens in enumerate((3, 4, 50)):
        ledger.submit(name, index, facts(1.0, tokens=tokens))
    plan, _ = ledger.form(0)
    assert plan is not None and plan.tokens == ((0, 7),)  # 3 + 4
    assert [(row.sample_index, row.baseline, row.trains) for row in ledger.table(plan)] == [(0, False, True), (1, False, True), (2, True, False)]


@pytest.mark.parametrize("unscored", ["drop_sample", "drop_group"])
def test_a_group_whose_greedy_answer_has_no_score_is_dropped_for_that_reason(unscored: str) -> None:
    ledger = with_baseline(unscored=unscored)
    (name,) = opened(ledger)
    answer = completed(ledger, name, (0.0, 1.0, None))
    assert (answer.group, answer.reason) == ("dropped", "no_baseline")
    assert ledger.counts().dropped == {"no_baseline": 1} and ledger.room() == 2


def test_the_greedy_answer_is_no_usable_sample() -> None:
    ledger = with_baseline(min_usable=2)
    (name,) = opened(ledger)
    assert completed(ledger, name, (None, 1.0, 1.0)).reason == "unusable"


def test_its_reward_is_no_spread_and_no_pass() -> None:
    # samples 1, 1 are flat whatever the greedy answer got; their pass rate is 1, not 2 / 3
    ledger = with_baseline(zero_signal=True)
    ledger.set_data({"": Rules(tracked=True)})
    group, _ = ledger.open_group(holder="a", lease_id="l", now=0.0, lapse_at=9.0, prompt_id="p", prompt_row=4, pick={"why": "order", "epoch": 0, "at": 1})
    assert completed(ledger, group.group_id, (1.0, 1.0, 0.0)).reason == "zero_signal"
    assert ledger.account.history.look("").tracks[4].rates == (1.0,)


def test_a_saved_account_knows_its_baselines() -> None:
    ledger = with_baseline()
    (name,) = opened(ledger)
    completed(ledger, name, (0.0, 1.0))
    again = Ledger.from_state(ledger.limits, msgpack.unpackb(msgpack.packb(ledger.state())))
    assert completed_last(again, name) == "no_baseline"


def completed_last(ledger: Ledger, name: str) -> str:
    return ledger.submit(name, 2, facts(None, reason="unscored_timeout")).reason


def test_sizes_count_the_greedy_answer_in() -> None:
    rules = Limits(groups_per_step=1, group_size=4, max_staleness=1, group_sizes={"a": 3, "b": 6}, baselines=frozenset({"a"}))
    assert (rules.size_of("a"), rules.size_of("b"), rules.size_of("c"), rules.largest_group) == (4, 6, 4, 6)


async def test_a_lease_asks_for_it_and_the_trainer_gets_its_reward_and_no_payload(tmp_path: Path) -> None:
    config = config_in(tmp_path, algorithm=REMAX, groups_per_step=1)
    async with scenes.begun(config, tmp_path) as at:
        (lease,) = await at.actor.lease()
        assert (lease.group_size, list(lease.greedy)) == (3, [2]) and lease.sampling.temperature == 1.0
        await at.actor.submit(*(sample(lease, index, 1, reward=reward) for index, reward in enumerate((0.0, 1.0, 0.25))))
        header, rows = await at.trainer.take(0)
        assert [(row.sample_index, row.reward, row.baseline) for row in header.table] == [(0, 0.0, False), (1, 1.0, False), (2, 0.25, True)]
        assert [row.sample_index for row in rows] == [0, 1] and header.num_rows == 2
        assert dict(header.stats.tokens_by_staleness) == {0: 6}


async def test_a_greedy_answer_without_a_score_costs_its_group_and_is_counted(tmp_path: Path) -> None:
    config = config_in(tmp_path, algorithm=REMAX, groups_per_step=1)
    async with scenes.begun(config, tmp_path) as at:
        (lease,) = await at.actor.lease()
        await at.actor.submit(sample(lease, 0, 1), sample(lease, 1, 1), sample(lease, 2, 1, reward=None))
        status = await at.actor.stub.GetStatus(learner_pb2.GetStatusRequest())
        assert (dict(status.num_dropped), dict(status.num_unusable), status.num_open) == ({"no_baseline": 1}, {"unscored_timeout": 1}, 0)


async def test_a_run_keeps_its_groups_size_when_it_goes_on(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with scenes.begun(config, tmp_path) as at:
        await at.step(0, will_save=True)
        await at.trainer.save(1, config.run_dir)
    changed = LearnerConfig.model_validate({**config.model_dump(exclude={"algorithm"}), "algorithm": REMAX})
    with pytest.raises(ValueError, match=r"advantage.kind=greedy_baseline=\['data'\], was \[\]"):
        async with running(changed):
            pass
