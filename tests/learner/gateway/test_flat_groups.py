"""Dynamic sampling is bounded: every batch is full, and what has no signal ends the run or is trained, by setting, and is counted."""

from __future__ import annotations

import pytest

from learner.gateway.groups import SampleFacts, verdict
from tests.learner.gateway.picking_run import Run, prompts


def run_of(num: int, rates: dict[int, float], **limits: object) -> Run:
    return Run(data={"prompts": "x", "shuffle": False}, sets={"": prompts(num)}, rates=rates, limits={"zero_signal": True, **limits})


@pytest.mark.parametrize(("rewards", "dropped"), [((0.4, 0.4, 0.4, 0.4), "zero_signal"), ((0.3, 0.5, 0.4, 0.4), ""), ((1.0, 1.0, 1.0, 1.0), "zero_signal"), ((1.0, 1.0, 1.0, 1.0 + 1e-7), "zero_signal")])
def test_the_spread_decides_and_not_the_mean(rewards: tuple[float, ...], dropped: str) -> None:
    # faults.md 65, 66
    samples = {index: SampleFacts(reward=reward, num_prompt_tokens=1, num_completion_tokens=1, num_trained_tokens=1, spans=((1, 1),)) for index, reward in enumerate(rewards)}
    assert verdict(samples, min_usable=2, zero_signal=True, unscored="drop_sample") == dropped


def test_nine_of_ten_prompts_without_signal_leave_every_batch_full_of_signal() -> None:
    # faults.md 68
    run = run_of(10, dict.fromkeys(range(9), 1.0))
    run.fill(100)
    assert len(run.batches) == 5 and all(batch == [9, 9] for batch in run.batches)
    assert run.ledger.counts().dropped == {"zero_signal": 90}


def test_no_signal_at_all_ends_the_run_after_the_bound_with_the_counts() -> None:
    # faults.md 68
    run = run_of(10, dict.fromkeys(range(10), 1.0), max_consecutive_drops=20)
    run.fill(10_000)
    assert 21 <= len(run.picks) <= 24 and not run.batches  # four may be open when the bound is passed
    assert "more than filter.max_consecutive_drops=20 (dropped so far: zero_signal: 2" in run.ledger.exhausted


def test_after_so_many_flat_groups_a_batch_is_filled_with_what_there_is() -> None:
    """Ten prompts, the last of them with signal. Of each ten groups the first five without signal are dropped for the batch, then two fill it."""
    run = run_of(10, dict.fromkeys(range(9), 1.0), max_flat_a_step=5)
    run.fill(40)
    account = run.ledger.account
    assert run.batches and all(len(batch) == 2 for batch in run.batches)
    assert account.num_kept_flat == sum(row != 9 for batch in run.batches for row in batch) > 0
    assert account.dropped["zero_signal"] >= 5 * (len(run.batches) - 1) and account.flat_in_step <= 5
    assert run.ledger.counts().leased == run.ledger.counts().trained + sum(account.dropped.values()) + account.num_open


def test_a_data_set_without_any_signal_still_ends_the_run_though_batches_are_filled() -> None:
    run = run_of(4, dict.fromkeys(range(4), 0.0), max_flat_a_step=3, max_consecutive_drops=20)
    run.fill(10_000)
    assert len(run.batches) > 3 and "max_consecutive_drops=20" in run.ledger.exhausted


def test_the_bound_of_a_step_may_end_the_run_instead() -> None:
    run = run_of(10, dict.fromkeys(range(10), 1.0), max_flat_a_step=5, flat_fails=True)
    run.fill(10_000)
    assert "6 groups without signal were dropped for one batch, more than filter.max_flat_a_step=5 with then=fail" in run.ledger.exhausted.replace("7 groups", "6 groups").replace("8 groups", "6 groups")


@pytest.mark.parametrize("from_records", [False, True])
def test_the_bound_is_kept_over_a_restart(from_records: bool) -> None:
    run = run_of(10, dict.fromkeys(range(10), 1.0), max_flat_a_step=5)
    run.fill(3)
    run.kill(from_records=from_records)
    assert run.ledger.account.flat_in_step == 3
    run.fill(8)
    assert run.ledger.account.num_kept_flat >= 2
