"""What is not waited for: groups whose fate is known, and samples beyond the first of an oversampled group; each counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from learner.gateway.groups import SampleFacts, early_verdict
from learner.gateway.ledger import Ledger, Limits
from protos.learner.v1alpha1 import learner_pb2 as pb
from tests.learner.gateway.gateway_harness import config_in, sample
from tests.learner.gateway.scenes import begun
from tests.learner.gateway.test_baseline import REMAX


def scored(reward: float) -> SampleFacts:
    return SampleFacts(reward=reward, num_prompt_tokens=1, num_completion_tokens=3, num_trained_tokens=3, spans=((1, 3),))


def unusable(reason: str) -> SampleFacts:
    return SampleFacts(reward=None, unusable_reason=reason, num_prompt_tokens=1, num_completion_tokens=3, num_trained_tokens=3, spans=((1, 3),))


LATE, NAN = unusable("unscored_timeout"), unusable("non_finite_logprob")


@pytest.mark.parametrize(
    ("samples", "unscored", "stop_flat_after", "verdict"),
    [
        # four samples to a group, two usable ones needed
        ({0: LATE, 1: NAN}, "drop_sample", None, ""),  # two may still be usable
        ({0: LATE, 1: NAN, 3: NAN}, "drop_sample", None, "unusable"),  # one at most
        ({0: LATE, 1: NAN, 3: scored(1.0)}, "drop_sample", None, ""),
        ({2: LATE}, "drop_group", None, "unscored"),
        ({2: NAN}, "drop_group", None, ""),  # not for want of a score
        ({0: scored(0.0), 1: scored(0.0)}, "drop_sample", 3, ""),
        ({0: scored(0.0), 1: scored(0.0), 3: scored(0.0)}, "drop_sample", 3, "flat_early"),
        ({0: scored(0.0), 1: scored(1.0), 3: scored(0.0)}, "drop_sample", 3, ""),
        ({0: scored(0.0), 1: scored(0.0), 3: NAN}, "drop_sample", 3, ""),  # two usable ones
        ({0: scored(0.0), 1: scored(0.0), 3: scored(0.0)}, "drop_sample", None, ""),  # not asked for
    ],
)
def test_a_group_is_given_up_when_nothing_can_save_it(samples: dict[int, SampleFacts], unscored: str, stop_flat_after: int | None, verdict: str) -> None:
    assert early_verdict(samples, size=4, min_usable=2, zero_signal=True, unscored=unscored, stop_flat_after=stop_flat_after) == verdict


def test_the_missing_greedy_answer_is_no_sample_that_may_become_usable() -> None:
    # two samples and the greedy answer (index 2): with one of them unusable one is left, and two are needed
    samples = {0: NAN}
    assert early_verdict(samples, size=3, min_usable=2, zero_signal=False, unscored="drop_sample", stop_flat_after=None, baseline_index=2) == "unusable"
    assert early_verdict({2: LATE}, size=3, min_usable=1, zero_signal=False, unscored="drop_sample", stop_flat_after=None, baseline_index=2) == "no_baseline"


def test_groups_are_not_given_up_early_when_the_next_batch_takes_them_as_they_are() -> None:
    rules = Limits(groups_per_step=1, group_size=4, max_staleness=3, zero_signal=True, stop_flat_after=2, max_flat_a_step=1)
    ledger = Ledger(rules)
    ledger.publish(0)
    for number in range(2):
        group, _ = ledger.open_group(holder="a", lease_id=f"l{number}", now=0.0, lapse_at=9.0, prompt_id="p", prompt_row=0)
        answers = [ledger.submit(group.group_id, index, scored(1.0)) for index in range(4)]
        # flat_early does not count as flat in the step, zero_signal does: so both are given up after two samples
        assert [answer.reason for answer in answers][:2] == ["", "flat_early"]
    account = ledger.account
    account.flat_in_step = 1
    group, _ = ledger.open_group(holder="a", lease_id="l9", now=0.0, lapse_at=9.0, prompt_id="p", prompt_row=0)
    assert [ledger.submit(group.group_id, index, scored(1.0)).group for index in range(4)] == ["open", "open", "open", "complete"]


def test_the_first_samples_of_an_oversampled_group_complete_it() -> None:
    ledger = Ledger(Limits(groups_per_step=1, group_size=2, max_staleness=1, oversample=2))
    ledger.publish(0)
    group, _ = ledger.open_group(holder="a", lease_id="l", now=0.0, lapse_at=9.0, prompt_id="p", prompt_row=0)
    assert (group.size, group.num_drawn) == (2, 4)
    assert ledger.submit(group.group_id, 3, scored(0.0)).group == "open"
    assert ledger.submit(group.group_id, 1, scored(1.0)).group == "complete"
    late = ledger.submit(group.group_id, 0, scored(1.0))
    assert (late.status, late.group, late.record) == ("unwanted", "complete", None)
    with pytest.raises(ValueError, match="outside the group of 4"):
        ledger.submit(group.group_id, 4, scored(1.0))
    plan, _ = ledger.form(0)
    assert plan is not None and [row.sample_index for row in ledger.table(plan)] == [1, 3]
    assert Ledger.from_state(ledger.limits, ledger.state()).account.groups[0].extra == 2


async def test_the_receipt_that_completes_a_group_says_so_and_the_rest_is_counted(tmp_path: Path) -> None:
    config = config_in(tmp_path, sampling={"group_size": 2, "oversample": 1, "max_new_tokens": 8}, filter={"unscored": "drop_group"})
    async with begun(config, tmp_path) as at:
        first, second = await at.actor.lease(max_groups=2)
        assert first.group_size == 3
        receipts = await at.actor.submit(sample(first, 2, 1), sample(first, 0, 1, reward=0.0), sample(first, 1, 1), sample(second, 0, 1, reward=None))
        assert [(receipt.status, receipt.group_is_over) for receipt in receipts] == [
            (pb.RECEIPT_STATUS_ACCEPTED, False),
            (pb.RECEIPT_STATUS_ACCEPTED, True),  # two of three are in
            (pb.RECEIPT_STATUS_UNWANTED, True),
            (pb.RECEIPT_STATUS_ACCEPTED, True),  # dropped for its one unscored sample
        ]
        status = await at.actor.stub.GetStatus(pb.GetStatusRequest(), timeout=30)
        assert dict(status.num_stopped) == {"oversampled": 1, "unscored": 2}
        assert dict(status.num_dropped) == {"unscored": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"filter": {"stop_flat_after": 2}}, "stop_flat_after=2 with zero_signal=false"),
        ({"sampling": {"group_size": 2, "max_new_tokens": 8, "oversample": 1}, "algorithm": REMAX}, "oversample=1 with advantage.kind=greedy_baseline"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_in(tmp_path, **changes)


def test_nothing_is_cut_unless_asked_for() -> None:
    sampling, rules = LearnerConfig.model_fields["sampling"], LearnerConfig.model_fields["filter"]
    assert sampling.get_default(call_default_factory=True).oversample == 0 and rules.get_default(call_default_factory=True).stop_flat_after is None
