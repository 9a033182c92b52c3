"""The clipped loss worked by hand: bounds .2 / .2 and dual clip 3 unless said otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.policy_loss import clipped_policy_loss
from tests.learner.algorithms import slopes


def loss_of(ratio: float, advantage: float, *, dual_clip: float | None = 3.0, clip_high: float = 0.2) -> tuple[float, float, dict[str, Tensor]]:
    """(loss, d loss / d logprob, metrics) of one token."""
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_policy_loss(logprob, torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage]), clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip)
    loss.sum().backward()
    assert logprob.grad is not None
    return float(loss.detach()), float(logprob.grad), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss", "gradient"),
    [
        (1.0, 2.0, 3.0, -2.0, -2.0),  # nothing clipped: -rA, gradient -rA
        (1.1, 1.0, 3.0, -1.1, -1.1),
        (50.0, 1.0, 3.0, -1.2, 0.0),  # faults.md 86: clipped above
        (50.0, -1.0, None, 50.0, 50.0),  # faults.md 86: unbounded without the dual clip
        (50.0, -1.0, 3.0, 3.0, 0.0),  # faults.md 86: bounded by it
        (2.0, -1.0, 3.0, 2.0, 2.0),  # below the bound: pushed back with its whole gradient
        (0.5, -1.0, 3.0, 0.8, 0.0),  # clipped below
        (0.5, 1.0, 3.0, -0.5, -0.5),  # worse than before and should be better: not clipped
    ],
)
def test_loss_and_gradient(ratio: float, advantage: float, dual: float | None, loss: float, gradient: float) -> None:
    found, slope, _ = loss_of(ratio, advantage, dual_clip=dual)
    assert found == pytest.approx(loss)
    assert slope == pytest.approx(gradient)


def test_the_ratio_is_to_the_policy_that_drew_the_token() -> None:
    # faults.md 39: drawn with log-prob -1, now -.5: e^.5, and not 1 as it would be to the present weights
    assert float(loss_of(math.exp(0.5), 1.0)[2]["ratio"]) == pytest.approx(1.64872, abs=1e-5)


def test_upper_bound_may_be_wider_than_the_lower() -> None:
    assert loss_of(1.25, 1.0, clip_high=0.28)[0] == pytest.approx(-1.25)
    assert loss_of(1.3, 1.0, clip_high=0.28)[0] == pytest.approx(-1.28)


def test_what_was_clipped_is_counted() -> None:
    ratio = torch.tensor([50.0, 50.0, 0.5, 1.0, 0.5])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0])
    _, metrics = clipped_policy_loss(ratio.log(), torch.zeros(5), advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx({"clipped_high": 1, "clipped_dual": 1, "clipped_low": 1, "ratio": 102.0})


@pytest.mark.parametrize("difference", [200.0, -200.0, 1e4])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_huge_difference_stays_finite_and_zero_times_it_is_zero(difference: float, advantage: float) -> None:
    # faults.md 85
    logprob = torch.tensor([difference], requires_grad=True)
    loss, _ = clipped_policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert logprob.grad is not None and bool(torch.isfinite(loss)) and bool(torch.isfinite(logprob.grad))
    if advantage == 0:
        assert float(loss.detach()) == 0 and float(logprob.grad) == 0


def test_nan_stays_visible() -> None:
    loss, _ = clipped_policy_loss(torch.tensor([float("nan")]), torch.zeros(1), torch.ones(1), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert bool(torch.isnan(loss))


def test_different_lengths_are_refused() -> None:
    # faults.md 50
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        clipped_policy_loss(torch.zeros(3), torch.zeros(2), torch.zeros(3), clip_low=0.2, clip_high=0.2, dual_clip=None)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=6), st.sampled_from([None, 3.0]))
def test_it_is_the_formula_written_out(tokens: list[tuple[float, float]], dual: float | None) -> None:
    expected = []
    for d, a in tokens:
        r = math.exp(d)
        loss = -min(r * a, min(max(r, 0.8), 1.28) * a)
        expected.append(min(loss, dual * abs(a)) if dual and a < 0 else loss)
    log_ratio, advantage = slopes.vector([t[0] for t in tokens]), slopes.vector([t[1] for t in tokens])
    assert clipped_policy_loss(log_ratio, torch.zeros_like(log_ratio), advantage, clip_low=0.2, clip_high=0.28, dual_clip=dual)[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_gradient_is_that_of_finite_differences_off_the_corners() -> None:
    old, advantage, point = slopes.vector([-1.0] * 5), slopes.vector([1, 1, -1, -1, -1]), [-0.9, -0.5, -1.1, -1.5, 0.5]

    def loss(p: Tensor) -> Tensor:
        return clipped_policy_loss(p, old, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)[0]

    assert slopes.slope(loss, point) == pytest.approx(slopes.difference(loss, point), abs=1e-6)
