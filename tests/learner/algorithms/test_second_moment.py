"""M2PO's mask by hand and against removing tokens one by one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.second_moment import second_moment_threshold, within
from tests.learner.algorithms import slopes


def test_the_largest_go_until_the_mean_square_is_within_the_bound() -> None:
    # squares .01 .01 .04 1: mean .265; without the 1: .06 / 3 = .02 <= .04
    assert second_moment_threshold(slopes.vector([0.1, -0.1, 0.2, -1.0]), bound=0.04) == pytest.approx(0.2)
    assert within(slopes.vector([0.1, -0.1, 0.2, -1.0]), 0.2).tolist() == [1.0, 1.0, 1.0, 0.0]


def test_within_the_bound_none_goes_and_beyond_it_all_may() -> None:
    assert second_moment_threshold(slopes.vector([0.1, 0.1]), bound=0.04) == math.inf
    assert second_moment_threshold(torch.zeros(0), bound=0.04) == math.inf
    assert second_moment_threshold(slopes.vector([1.0, -1.0]), bound=0.04) == -1.0
    assert within(slopes.vector([0.0]), -1.0).tolist() == [0.0]


@given(st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=1, max_size=10), st.sampled_from([0.01, 0.04, 0.3]))
def test_it_keeps_as_many_as_the_bound_allows(values: list[float], bound: float) -> None:
    kept = sorted(values, key=abs)
    while kept and sum(v * v for v in kept) / len(kept) > bound:
        largest = abs(kept[-1])
        kept = [v for v in kept if abs(v) < largest]  # ties go together
    found = within(slopes.vector(values), second_moment_threshold(slopes.vector(values), bound=bound))
    assert int(found.sum()) == len(kept)
