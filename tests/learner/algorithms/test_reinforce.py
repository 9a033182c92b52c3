"""REINFORCE by hand."""

from __future__ import annotations

import math

import pytest
import torch

from learner.algorithms.reinforce import reinforce_loss
from tests.learner.algorithms import slopes


def test_loss_is_minus_advantage_times_logprob() -> None:
    old = slopes.vector([-1, -1])
    loss, metrics = reinforce_loss(slopes.vector([-1, -2]), old, slopes.vector([2, -1]))
    assert loss.tolist() == [2.0, -2.0] and float(metrics["ratio"]) == pytest.approx(1 + 0.3678794)
    assert slopes.slope(lambda p: reinforce_loss(p, old, slopes.vector([2, -1]))[0], [-1.0, -2.0]) == [-2.0, 1.0]


def test_the_expected_gradient_under_the_policy_is_that_of_the_expected_reward() -> None:
    # two actions of p = .3, .7 with rewards 1, 0: d E[r] / d logit_0 = p0 (1 - p0) = .21; sum p_a r_a d log p_a
    def loss(logits: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(logits, 0)
        return (p.detach() * reinforce_loss(p.log(), p.log().detach(), slopes.vector([1, 0]))[0]).sum()

    assert slopes.slope(loss, [math.log(0.3), math.log(0.7)]) == pytest.approx([-0.21, 0.21])
