"""Score centering: the mean score under the sampler is gone, the covariance stays."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.score_centering import centered_score_loss
from tests.learner.algorithms import slopes

P, Q = [0.6, 0.4], [0.5, 0.5]


def expected_gradient(logits: list[float], q: list[float], w: list[float], advantage: list[float]) -> list[float]:
    """Of the loss summed over every token with its chance under q."""
    n = len(q)

    def loss(z: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(z, 0).expand(n, n)
        return slopes.vector(q) * centered_score_loss(log_p, slopes.vector(q).expand(n, n), slopes.vector(w).expand(n, n), torch.arange(n), slopes.vector(advantage))

    return slopes.slope(loss, logits)


def test_a_constant_advantage_teaches_nothing() -> None:
    # score of p = (.6, .4): mean under q is q - p = (-.1, .1), which is taken out
    assert expected_gradient(torch.tensor(P).log().tolist(), Q, [1.0, 1.0], [3.0, 3.0]) == pytest.approx([0.0, 0.0], abs=1e-7)


def test_what_stays_is_the_covariance_of_advantage_and_score() -> None:
    # A = (1, 0): E[A s] - E[A] E[s] = .5 (.4, -.4) - .5 (-.1, .1) = (.25, -.25); the loss has the opposite sign
    assert expected_gradient(torch.tensor(P).log().tolist(), Q, [1.0, 1.0], [1.0, 0.0]) == pytest.approx([-0.25, 0.25], abs=1e-6)


@given(st.lists(st.tuples(slopes.numbers, slopes.numbers), min_size=2, max_size=4))
def test_with_exact_weights_the_subtracted_mean_has_no_gradient(logits: list[tuple[float, float]]) -> None:
    target, sampler = (torch.softmax(slopes.vector([row[i] for row in logits]), 0) for i in range(2))
    advantage = [float(i) for i in range(len(logits))]
    found = expected_gradient([z for z, _ in logits], sampler.tolist(), (target / sampler).tolist(), advantage)
    mean = float((target * slopes.vector(advantage)).sum())
    expected = [-float(t) * (a - mean) for t, a in zip(target, advantage, strict=True)]  # of -E_p[A]
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_token_that_the_sampler_never_draws_adds_nothing() -> None:
    log_p = torch.tensor([[0.0, float("-inf")]])
    assert slopes.finite(centered_score_loss(log_p, torch.tensor([[1.0, 0.0]]), torch.ones(1, 2), torch.tensor([0]), torch.ones(1)))
    with pytest.raises(ValueError, match="vocabulary"):
        centered_score_loss(log_p, torch.ones(1, 3), torch.ones(1, 2), torch.tensor([0]), torch.ones(1))
