"""REINFORCE++ by hand: statistics of the batch, weighed by tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.batch_advantages import batch_advantages, whiten
from learner.algorithms.rewards import GroupScores
from tests.learner.algorithms import slopes


def groups(*content: tuple[list[float], list[int]]) -> list[GroupScores]:
    return [GroupScores(rewards=slopes.vector(r), num_tokens=torch.tensor(n)) for r, n in content]


def listed(values: list[torch.Tensor]) -> list[list[float]]:
    return [value.tolist() for value in values]


def test_a_long_sample_weighs_by_its_tokens() -> None:
    # rewards 1 (1 token) and 0 (3 tokens): mean .25, variance .25 * .75 = .1875, deviation .4330: 1.7320, -.5774
    found = listed(batch_advantages(groups(([1.0], [1]), ([0.0], [3])), group_baseline=False))
    assert found == [pytest.approx([math.sqrt(3)]), pytest.approx([-1 / math.sqrt(3)])]


def test_with_a_baseline_groups_are_centred_before() -> None:
    # [1, 0] and [10, 10, 10, 8], one token each: centred .5, -.5 and .5, .5, .5, -1.5; mean 0, variance (.5 + .75 + 2.25) / 6 = .5833
    deviation = math.sqrt(3.5 / 6)
    found = listed(batch_advantages(groups(([1, 0], [1, 1]), ([10, 10, 10, 8], [1] * 4)), group_baseline=True))
    assert found[0] == pytest.approx([0.5 / deviation, -0.5 / deviation])
    assert found[1] == pytest.approx([0.5 / deviation] * 3 + [-1.5 / deviation])


def test_a_flat_group_stays_zero_beside_others_whose_mean_is_not() -> None:
    # centred: 0, 0 | .5 (3 tokens), -.5 (1 token): the token mean is .25 / 1.5, which a flat group must not inherit
    found = listed(batch_advantages(groups(([0.4, 0.4], [1, 1]), ([1, 0], [3, 1])), group_baseline=True))
    assert found[0] == [0.0, 0.0] and found[1][0] > 0 > found[1][1]


def test_without_spread_tokens_or_groups_there_is_nothing() -> None:
    assert listed(batch_advantages(groups(([1.0, 1.0], [5, 5]), ([1.0], [2])), group_baseline=False)) == [[0.0, 0.0], [0.0]]
    assert listed(batch_advantages(groups(([1.0, 0.0], [0, 0])), group_baseline=False)) == [[0.0, 0.0]]
    assert batch_advantages([], group_baseline=True) == []


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 6)), min_size=1, max_size=8))
def test_whitening_is_that_of_the_tokens_written_out(samples: list[tuple[float, int]]) -> None:
    tokens = [value for value, count in samples for _ in range(count)]
    found = whiten(slopes.vector([v for v, _ in samples]), torch.tensor([n for _, n in samples])).tolist()
    if max(tokens) - min(tokens) < 1e-6:
        assert found == [0.0] * len(samples)
    else:
        mean = sum(tokens) / len(tokens)
        assert found == pytest.approx([(v - mean) / slopes.std(tokens) for v, _ in samples], rel=1e-5, abs=1e-5)
