"""CISPO by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.cispo import cispo_loss
from tests.learner.algorithms import slopes


@pytest.mark.parametrize(("ratio", "advantage", "weight"), [(1.0, 1.0, 1.0), (50.0, 1.0, 3.0), (50.0, -1.0, 3.0), (0.01, -1.0, 0.01), (0.01, 1.0, 0.01)])
def test_the_gradient_is_the_clipped_weight_times_advantage_and_never_lost(ratio: float, advantage: float, weight: float) -> None:
    logprob = slopes.vector([math.log(ratio) - 1.0], grad=True)
    loss, _ = cispo_loss(logprob, slopes.vector([-1.0]), slopes.vector([advantage]), clip_low=1.0, clip_high=2.0)
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(-weight * advantage * float(logprob.detach()))
    assert logprob.grad is not None and float(logprob.grad) == pytest.approx(-weight * advantage)


def test_the_weight_is_held_constant_as_finite_differences_with_it_fixed_say() -> None:
    old, advantage = slopes.vector([-1.0, -2.0]), slopes.vector([1.0, -0.5])
    point = [-0.8, -2.3]
    fixed = (slopes.vector(point) - old).exp().clamp(0, 3)

    def frozen(p: Tensor) -> Tensor:
        return -fixed * advantage * p

    found = slopes.slope(lambda p: cispo_loss(p, old, advantage, clip_low=1.0, clip_high=2.0)[0], point)
    assert found == pytest.approx(slopes.difference(frozen, point), abs=1e-6)


@given(st.lists(slopes.log_ratios, max_size=4))
def test_any_difference_is_finite(log_ratio: list[float]) -> None:
    gradient = slopes.slope(lambda p: cispo_loss(p, torch.zeros_like(p), torch.ones_like(p), clip_low=1.0, clip_high=2.0)[0], log_ratio)
    assert all(-3 <= g <= 0 for g in gradient)
