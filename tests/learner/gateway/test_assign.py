"""Whole groups go to ranks, balanced by tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.gateway.assign import group_cost, owners


def test_the_longest_group_goes_first_to_the_emptiest_rank() -> None:
    # 9 to rank 0, 5 to rank 1, 4 to rank 1 (5 < 9): loads 9 and 9
    assert owners([5, 9, 4], 2) == (1, 0, 1)


def test_one_rank_gets_everything() -> None:
    assert owners([1, 2, 3], 1) == (0, 0, 0)


def test_groups_without_usable_tokens_spread_too() -> None:
    assert owners([0, 0], 2) == (0, 1)


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks=0"):
        owners([1], 0)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_the_fullest_rank_is_within_one_group_of_the_mean(tokens: list[int], num_ranks: int) -> None:
    loads = [0] * num_ranks
    for size, owner in zip(tokens, owners(tokens, num_ranks), strict=True):
        loads[owner] += size
    assert max(loads) <= sum(tokens) / num_ranks + max(tokens, default=0)


def test_a_group_costs_its_prompt_once_and_more_than_its_tokens_where_they_are_many() -> None:
    # 100 + 80 tokens and 5000 + 6250 + 3450 pairs: one token more; a completion of 24,576 has 24,576² / 2 pairs: as much again
    assert group_cost(100, [50, 30]) == 181
    assert group_cost(0, [24_576]) == 2 * 24_576
    assert group_cost(0, []) == 0
