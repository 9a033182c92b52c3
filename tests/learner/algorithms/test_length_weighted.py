"""OPO by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.length_weighted import length_weighted_advantages
from tests.learner.algorithms import slopes


def test_the_baseline_is_the_mean_reward_of_a_token() -> None:
    # 8 tokens of reward 1 and 2 of reward 0: baseline .8
    assert length_weighted_advantages(slopes.vector([1, 0]), torch.tensor([8, 2])).tolist() == pytest.approx([0.2, -0.8])


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 9)), min_size=1, max_size=8))
def test_any_group_gives_the_formula_or_exactly_zero(samples: list[tuple[float, int]]) -> None:
    values, lengths = [v for v, _ in samples], [n for _, n in samples]
    found = length_weighted_advantages(slopes.vector(values), torch.tensor(lengths)).tolist()
    if max(values) - min(values) < 1e-6 or sum(lengths) == 0:
        assert found == [0.0] * len(values)
    else:
        baseline = sum(v * n for v, n in samples) / sum(lengths)
        assert found == pytest.approx([v - baseline for v in values], abs=1e-9)
        assert sum(a * n for a, n in zip(found, lengths, strict=True)) == pytest.approx(0, abs=1e-8)  # no drift by length


def test_one_length_for_each_reward() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        length_weighted_advantages(slopes.vector([1, 0]), torch.tensor([1, 2, 3]))
