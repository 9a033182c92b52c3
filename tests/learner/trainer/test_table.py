"""What follows from the table alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from learner.algorithm_config import GroupAdvantage
from learner.trainer.credit import advantage_function, advantages_of
from learner.trainer.table import Entry, Minibatch, cut, zero_signal_share


def entry(group: str, index: int, reward: float, **changes: object) -> Entry:
    made = Entry(
        group_id=group, sample_index=index, reward=reward, usable=True, num_prompt_tokens=3, num_completion_tokens=10, num_trained_tokens=10,
        staleness=0, owner=0, truncated=False, num_versions=1,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def grouped(table: list[Entry], *, normalize: bool = True, num_minibatches: int = 1, **more: Any) -> list[Minibatch]:
    """The batch cut with GRPO's advantages."""
    return cut(table, advantages_of(table, advantage_function(GroupAdvantage(normalize=normalize))), num_minibatches=num_minibatches, **more)


def test_lost_members_add_nothing_to_any_denominator() -> None:
    # faults.md 62, 77: two of four usable: normalised on the two, 20 tokens of 2 sequences
    table = [entry("g", 0, 1.0), entry("g", 1, 0.0), entry("g", 2, 9.0, usable=False), entry("g", 3, 7.0, usable=False)]
    (made,) = grouped(table)
    assert dict(made.advantages) == {("g", 0): 1.0, ("g", 1): -1.0}
    assert (made.counts.num_tokens, made.counts.num_sequences) == (20, 2)


def test_a_flat_group_counts_in_the_denominator_and_trains_nothing() -> None:
    table = [entry("a", 0, 1.0), entry("a", 1, 0.0), entry("b", 0, 0.4), entry("b", 1, 0.4)]
    (made,) = grouped(table)
    assert set(made.advantages) == {("a", 0), ("a", 1)}
    assert made.counts.num_tokens == 40
    assert zero_signal_share(table) == 0.5


def test_a_fully_masked_sample_sets_the_baseline_and_trains_nothing() -> None:
    table = [entry("g", 0, 1.0), entry("g", 1, 0.0, num_trained_tokens=0), entry("g", 2, 0.5)]
    (made,) = grouped(table, normalize=False)
    assert dict(made.advantages) == {("g", 0): 0.5}  # the third lies on the mean
    assert (made.counts.num_tokens, made.counts.num_sequences) == (20, 2)


def test_an_empty_response_is_unusable_and_moves_no_peer() -> None:
    # faults.md 80: reward 10 of the empty one is not a member's; the peer alone has no spread
    table = [entry("g", 0, 10.0, usable=False, num_completion_tokens=0, num_trained_tokens=0), entry("g", 1, 0.0)]
    (made,) = grouped(table)
    assert made.advantages == {}


def test_rows_are_matched_by_id_and_not_by_position() -> None:
    # faults.md 67
    table = [entry("a", 0, 1.0), entry("b", 0, 0.0), entry("a", 1, 0.0), entry("b", 1, 1.0)]
    (made,) = grouped(table)
    assert dict(made.advantages) == {("a", 0): 1.0, ("a", 1): -1.0, ("b", 0): -1.0, ("b", 1): 1.0}


@pytest.mark.parametrize(("num_minibatches", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1, 1, 1, 1, 1])])
def test_minibatches_hold_whole_groups(num_minibatches: int, sizes: list[int]) -> None:
    table = [entry(f"g{g}", i, float(i)) for g in range(5) for i in range(2)]
    made = grouped(table, num_minibatches=num_minibatches)
    assert [m.counts.num_sequences // 2 for m in made] == sizes


def test_a_masked_truncated_sample_sets_the_baseline_and_is_in_no_denominator() -> None:
    # faults.md 77: rewards 1, 0, 0, 0 with the last one cut off: advantages of four, three samples of 10 tokens
    table = [entry("g", i, float(i == 0), truncated=i == 3) for i in range(4)]
    (made,) = grouped(table, normalize=False, masks=lambda entry: entry.truncated)
    assert dict(made.advantages) == {("g", 0): 0.75, ("g", 1): -0.25, ("g", 2): -0.25}
    assert (made.counts.num_tokens, made.counts.num_sequences) == (30, 3)


def test_samples_of_advantage_zero_are_trained_where_the_objective_has_a_gradient_for_them() -> None:
    table = [entry("g", i, 0.5, staleness=i) for i in range(2)]
    (made,) = grouped(table, trains_all=lambda entry: True)
    assert dict(made.advantages) == {("g", 0): 0.0, ("g", 1): 0.0} and dict(made.staleness) == {("g", 0): 0, ("g", 1): 1}


@pytest.mark.parametrize(("size", "expected"), [(2, 0.7024), (4, 0.4490), (8, 0.2007), (16, 0.0403)])
def test_the_share_of_groups_without_signal_is_what_chance_makes_it(size: int, expected: float) -> None:
    # faults.md 69: p = .1819, p^G + (1 - p)^G; here over every number of right answers, each weighed by its chance
    p = 0.1819
    share = 0.0
    for right in range(size + 1):
        group = [entry("g", index, float(index < right)) for index in range(size)]
        share += math.comb(size, right) * p**right * (1 - p) ** (size - right) * zero_signal_share(group)
    assert share == pytest.approx(expected, abs=5e-5)
