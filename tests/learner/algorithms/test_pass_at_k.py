"""pass@k and its advantages against an enumeration of all subsets."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.pass_at_k import best_of_group_advantages, pass_at_k, pass_at_k_advantages
from tests.learner.algorithms import slopes


@pytest.mark.parametrize(("n", "c", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 0, 2, 0.0), (4, 4, 2, 1.0), (5, 2, 4, 1.0), (10, 3, 2, 1 - 21 / 45)])
def test_estimate(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_estimate_and_advantages_are_those_of_all_subsets_written_out(correct: list[bool], data: st.DataObject) -> None:
    n = len(correct)
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    worth = {s: float(any(correct[i] for i in s)) for s in subsets}
    mean = sum(worth.values()) / len(subsets)
    assert pass_at_k(n, sum(correct), k) == pytest.approx(mean)
    deviation = math.sqrt(sum((w - mean) ** 2 for w in worth.values()) / len(subsets))
    found = pass_at_k_advantages(slopes.vector([float(c) for c in correct]), k=k).tolist()
    for i in range(n):
        mine = [(worth[s] - mean) / deviation if deviation > 1e-9 else 0.0 for s in subsets if i in s]
        assert found[i] == pytest.approx(sum(mine) / len(mine), abs=1e-9)


def test_k_of_one_is_the_group_advantage_of_right_and_wrong() -> None:
    assert pass_at_k_advantages(slopes.vector([1, 0, 0, 0]), k=1).tolist() == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


def test_fewer_samples_than_k_carry_no_signal() -> None:
    assert pass_at_k_advantages(slopes.vector([1, 0]), k=3).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("rewards", "expected"), [([0.2, 0.9, 0.5], [0, 0.4, 0]), ([1, 1, 0], [0, 0, 0]), ([0.3], [0]), ([0.5, 0.5], [0, 0])])
def test_only_the_best_sample_is_credited_with_its_lead(rewards: list[float], expected: list[float]) -> None:
    assert best_of_group_advantages(slopes.vector(rewards)).tolist() == pytest.approx(expected)


def test_impossible_counts_are_refused() -> None:
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match=f"num_samples={n}, num_correct={c}, k={k}"):
            pass_at_k(n, c, k)
