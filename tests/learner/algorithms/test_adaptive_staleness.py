"""The bound's steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.adaptive_staleness import adapted_bound


@pytest.mark.parametrize(
    ("bound", "mismatch", "expected"),
    [(2, 0.2, 1), (2, 0.04, 3), (2, 0.07, 2), (2, 0.1, 2), (0, 0.2, 0), (4, 0.0, 4), (2, float("nan"), 1), (2, float("inf"), 1), (9, 0.07, 4)],
)
def test_one_step_at_a_time_within_limits(bound: int, mismatch: float, expected: int) -> None:
    assert adapted_bound(bound, mismatch, low=0.05, high=0.1, lowest=0, highest=4) == expected


@given(st.integers(0, 8), st.floats(0, 10), st.integers(0, 4), st.integers(0, 4))
def test_it_never_leaves_the_limits(bound: int, mismatch: float, lowest: int, more: int) -> None:
    assert lowest <= adapted_bound(bound, mismatch, low=0.05, high=0.1, lowest=lowest, highest=lowest + more) <= lowest + more


def test_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="lowest=3, highest=2"):
        adapted_bound(2, 0.1, low=0.05, high=0.1, lowest=3, highest=2)
    with pytest.raises(ValueError, match=r"low=0.2, high=0.1"):
        adapted_bound(2, 0.1, low=0.2, high=0.1, lowest=0, highest=2)
