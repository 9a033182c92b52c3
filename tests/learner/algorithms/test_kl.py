"""KL estimators: values by hand, means and gradients against the exact divergence of two small distributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.kl import adapted_coefficient, k1, k2, k3, kl_loss, kl_penalty_to_go
from tests.learner.algorithms import slopes


@pytest.mark.parametrize(("d", "expected"), [(-0.1, 0.0051709), (-1.0, 0.7182818), (0.0, 0.0), (1.0, 0.3678794)])
def test_k3_is_exp_of_minus_d_minus_one_plus_d(d: float, expected: float) -> None:
    # faults.md 84, with d = log p - log q: log-ratio .1 -> .0051709, 1 -> .7182818
    assert float(k3(slopes.vector([d]))) == pytest.approx(expected, abs=1e-7)


def test_k1_and_k2() -> None:
    assert k1(slopes.vector([0.3, -0.2])).tolist() == [0.3, -0.2]
    assert k2(slopes.vector([0.3, -0.2])).tolist() == pytest.approx([0.045, 0.02])


@pytest.mark.parametrize("d", [100.0, -100.0])
def test_a_huge_difference_has_finite_value_and_gradient_and_nan_stays_visible(d: float) -> None:
    # faults.md 84: in float32
    for estimator in (k2, k3):
        value = torch.tensor([d], requires_grad=True)
        estimator(value).sum().backward()
        assert value.grad is not None and slopes.finite(estimator(value)) and slopes.finite(value.grad)
        assert bool(torch.isnan(estimator(torch.tensor(float("nan")))))


def exact(z: Tensor, reference: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(z, 0), torch.log_softmax(reference, 0)
    return (log_p.exp() * (log_p - log_q)).sum()


pairs = st.lists(st.tuples(slopes.numbers, slopes.numbers), min_size=2, max_size=4)


@given(pairs)
def test_k1_and_k3_have_the_mean_of_the_divergence(logits: list[tuple[float, float]]) -> None:
    z, q = slopes.vector([a for a, _ in logits]), slopes.vector([b for _, b in logits])
    d = torch.log_softmax(z, 0) - torch.log_softmax(q, 0)
    for estimator in (k1, k3):
        assert float((torch.softmax(z, 0) * estimator(d)).sum()) == pytest.approx(float(exact(z, q)), abs=1e-9)


def mean_gradient(logits: list[tuple[float, float]], sampler: Tensor | None, **choice: Any) -> list[float]:
    """Gradient of kl_loss averaged over tokens drawn from `sampler` (None: from the policy itself)."""
    q = torch.log_softmax(slopes.vector([b for _, b in logits]), 0)

    def loss(z: Tensor) -> Tensor:
        log_p = torch.log_softmax(z, 0)
        drawn = log_p.detach() if sampler is None else sampler
        return (drawn.exp() * kl_loss(log_p, q, log_ratio=log_p - drawn, **choice)).sum()

    return slopes.slope(loss, [a for a, _ in logits])


@given(pairs)
def test_straight_through_and_importance_have_the_gradient_of_the_divergence(logits: list[tuple[float, float]]) -> None:
    q = slopes.vector([b for _, b in logits])
    expected = slopes.difference(lambda z: exact(z, q), [a for a, _ in logits])
    for choice in ({"estimator": "k3", "gradient": "straight_through"}, {"estimator": "k2", "gradient": "plain"}, {"estimator": "k3", "gradient": "importance"}, {"estimator": "k1", "gradient": "importance"}):
        assert mean_gradient(logits, None, **choice) == pytest.approx(expected, abs=1e-5), choice
    other = torch.log_softmax(slopes.vector([0.5 * a - 0.2 * b for a, b in logits]), 0)
    assert mean_gradient(logits, other, estimator="k3", gradient="importance") == pytest.approx(expected, abs=1e-5)  # off-policy as well


@given(pairs)
def test_plain_k1_in_the_loss_teaches_nothing(logits: list[tuple[float, float]]) -> None:
    assert mean_gradient(logits, None, estimator="k1", gradient="plain") == pytest.approx([0.0] * len(logits), abs=1e-9)


def test_straight_through_keeps_the_value_of_its_estimator() -> None:
    p, q = slopes.vector([-1.0]), slopes.vector([-2.0])
    assert float(kl_loss(p, q, estimator="k3", gradient="straight_through", log_ratio=p - p)) == pytest.approx(float(k3(p - q)))


def test_a_tokens_penalty_counts_what_comes_after_it_in_its_sample() -> None:
    # d = 1, 2 | 3 with coefficient .1: -(1 + 2) .1, -.2 | -.3
    found = kl_penalty_to_go(slopes.vector([0, 0, 0]), slopes.vector([-1, -2, -3]), torch.tensor([0, 0, 1]), num_sequences=2, coefficient=0.1, estimator="k1")
    assert found.tolist() == pytest.approx([-0.3, -0.2, -0.3])


def test_the_coefficient_follows_the_target_within_a_fifth_of_a_step() -> None:
    assert adapted_coefficient(0.1, 0.11, target=0.1, horizon_steps=10) == pytest.approx(0.1 * 1.01)
    assert adapted_coefficient(0.1, 50.0, target=0.1, horizon_steps=10) == pytest.approx(0.1 * 1.02)
    assert adapted_coefficient(0.1, 0.0, target=0.1, horizon_steps=10) == pytest.approx(0.1 * 0.98)
    assert adapted_coefficient(0.1, math.nan, target=0.1, horizon_steps=10) == 0.1
    with pytest.raises(ValueError, match="target=0"):
        adapted_coefficient(0.1, 0.1, target=0, horizon_steps=10)
