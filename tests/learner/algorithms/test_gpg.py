"""GPG by hand."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.gpg import gpg_advantages
from learner.algorithms.rewards import GroupScores
from tests.learner.algorithms import slopes


def advantages(*rewards: list[float]) -> list[list[float]]:
    made = [GroupScores(rewards=slopes.vector(r), num_tokens=torch.ones(len(r))) for r in rewards]
    return [value.tolist() for value in gpg_advantages(made)]


def test_flat_groups_scale_the_others_up() -> None:
    # 6 samples, 2 of them in a group with signal: alpha 3, times +-.5
    assert advantages([1, 0], [1, 1, 1, 1]) == [[1.5, -1.5], [0.0] * 4]


def test_without_flat_groups_it_is_the_distance_from_the_mean() -> None:
    assert advantages([1, 0], [3, 1]) == [[0.5, -0.5], [1.0, -1.0]]


def test_all_flat_is_zero_and_not_nan() -> None:
    assert advantages([1, 1], [0]) == [[0.0, 0.0], [0.0]]
    assert advantages() == []


def test_the_loss_of_a_batch_does_not_change_when_flat_groups_are_added() -> None:
    # sum over samples of advantage x score / number of samples, score 1 for the first of a group
    few, many = advantages([1, 0]), advantages([1, 0], [1, 1])
    assert few[0][0] / 2 == pytest.approx(many[0][0] / 4)
