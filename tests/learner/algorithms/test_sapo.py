"""SAPO by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.sapo import sapo_loss
from tests.learner.algorithms import slopes


def sapo(logprob: Tensor, advantage: float) -> Tensor:
    return sapo_loss(logprob, torch.zeros_like(logprob), torch.full_like(logprob, advantage), tau_positive=1.0, tau_negative=2.0)[0]


def test_at_ratio_one_value_is_two_over_tau_and_slope_one() -> None:
    # sigmoid(0) = .5: 4 / tau * .5 = 2 with tau 1, 1 with tau 2
    assert float(sapo(slopes.vector([0.0]), 1.0)) == pytest.approx(-2.0)
    assert float(sapo(slopes.vector([0.0]), -1.0)) == pytest.approx(1.0)
    assert slopes.slope(lambda p: sapo(p, 3.0), [0.0]) == pytest.approx([-3.0])
    assert slopes.slope(lambda p: sapo(p, -3.0), [0.0]) == pytest.approx([3.0])


@given(st.floats(-3, 1.5), st.sampled_from([-2.0, 0.5]))
def test_it_is_the_formula_written_out(log_ratio: float, advantage: float) -> None:
    tau = 1.0 if advantage > 0 else 2.0
    r = math.exp(log_ratio)
    assert float(sapo(slopes.vector([log_ratio]), advantage)) == pytest.approx(-4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage)
    assert slopes.slope(lambda p: sapo(p, advantage), [log_ratio]) == pytest.approx(slopes.difference(lambda p: sapo(p, advantage), [log_ratio]), abs=1e-5)


def test_the_gradient_fades_where_the_ratio_is_far_and_faster_for_negative_advantages() -> None:
    far = math.log(5.0)
    assert abs(slopes.slope(lambda p: sapo(p, 1.0), [far])[0]) < 5 * 4 * math.exp(-4)
    assert abs(slopes.slope(lambda p: sapo(p, -1.0), [far])[0]) < abs(slopes.slope(lambda p: sapo(p, 1.0), [far])[0])


@given(slopes.log_ratios, st.sampled_from([0.0, 1.0, -1.0]))
def test_any_difference_is_finite(log_ratio: float, advantage: float) -> None:
    gradient = slopes.slope(lambda p: sapo(p, advantage), [log_ratio])[0]
    assert math.isfinite(gradient) and (advantage != 0 or gradient == 0)
