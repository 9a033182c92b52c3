"""GDPO by hand."""

from __future__ import annotations

import math

import pytest
import torch

from learner.algorithms.rewards import GroupScores
from learner.algorithms.several_rewards import several_rewards_advantages
from tests.learner.algorithms import slopes


def group(**parts: list[float]) -> GroupScores:
    length = len(next(iter(parts.values())))
    return GroupScores(rewards=torch.zeros(length, dtype=torch.float64), num_tokens=torch.ones(length), parts={n: slopes.vector(v) for n, v in parts.items()})


def listed(*groups: GroupScores, **weights: float) -> list[list[float]]:
    return [value.tolist() for value in several_rewards_advantages(groups, weights=weights)]


def test_a_reward_of_large_numbers_does_not_drown_the_other() -> None:
    # a normalised: 1, -1 (of 1000, 0); b: -1, 1 (of 0, 1), weight .5: .5, -.5; one group of mean 0 and deviation .5: 1, -1
    assert listed(group(a=[1000.0, 0.0], b=[0.0, 1.0]), a=1.0, b=0.5) == [pytest.approx([1.0, -1.0])]
    # summed first, they would cancel for weights 1 and 1: here parts cancel exactly, and that is no signal
    assert listed(group(a=[1000.0, 0.0], b=[0.0, 1.0]), a=1.0, b=1.0) == [[0.0, 0.0]]


def test_different_combinations_of_the_same_total_stay_apart() -> None:
    # totals 1, 1, 0, 0 ... with a = 1 0 0 0 and b = 0 1 0 0: each part gives sqrt 3 to its one and -1/sqrt 3 to the others
    high, low = math.sqrt(3) - 1 / math.sqrt(3), -2 / math.sqrt(3)
    deviation = math.sqrt((2 * high**2 + 2 * low**2) / 4)
    assert listed(group(a=[1.0, 0, 0, 0], b=[0, 1.0, 0, 0]), a=1.0, b=1.0)[0] == pytest.approx([high / deviation] * 2 + [low / deviation] * 2)


def test_a_flat_group_stays_zero_beside_others() -> None:
    assert listed(group(a=[1.0, 1.0]), group(a=[3.0, 0.0]), a=1.0)[0] == [0.0, 0.0]
    assert listed(a=1.0) == []


def test_the_batch_is_brought_to_deviation_one() -> None:
    # parts normalised: +-1 and +-1; two groups; weights 3: sums +-3, whitened to +-1
    assert listed(group(a=[1.0, 0.0]), group(a=[5.0, 2.0]), a=3.0) == [pytest.approx([1.0, -1.0])] * 2


def test_a_missing_part_is_refused_and_never_zero() -> None:
    with pytest.raises(ValueError, match="'format' is missing"):
        listed(group(a=[1.0, 0.0]), a=1.0, format=1.0)
    with pytest.raises(ValueError, match="'a' is missing"):
        listed(group(a=[1.0, float("nan")]), a=1.0)
