"""Clip-Cov and KL-Cov by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.covariance import (
    kl_cov_loss,
    random_selection,
    token_covariance,
    top_threshold,
    without_gradient,
)
from tests.learner.algorithms import slopes


def test_covariance_is_the_product_of_both_distances() -> None:
    # log-probs -1, -3 (mean -2), A 1, -1 (mean 0): 1 * 1 and -1 * -1
    assert token_covariance(slopes.vector([-1, -3]), slopes.vector([1, -1]), logprob_mean=-2.0, advantage_mean=0.0).tolist() == [1.0, 1.0]
    # means of the batch and not of these tokens: (-1 + 1.5) * (3 - 1) and (-3 + 1.5) * (1 - 1)
    assert token_covariance(slopes.vector([-1, -3]), slopes.vector([3, 1]), logprob_mean=-1.5, advantage_mean=1.0).tolist() == [1.0, 0.0]


@given(st.lists(st.tuples(st.floats(-5, 0), slopes.numbers), min_size=1, max_size=9))
def test_its_mean_over_the_batch_is_the_covariance(tokens: list[tuple[float, float]]) -> None:
    lp, a = [x for x, _ in tokens], [y for _, y in tokens]
    mean_lp, mean_a = sum(lp) / len(lp), sum(a) / len(a)
    found = token_covariance(slopes.vector(lp), slopes.vector(a), logprob_mean=mean_lp, advantage_mean=mean_a)
    assert float(found.mean()) == pytest.approx(sum(x * y for x, y in tokens) / len(tokens) - mean_lp * mean_a, abs=1e-8)


def test_a_random_share_of_the_eligible_tokens_is_selected() -> None:
    # eligible: 1, 2 and 5 of [.5, 1, 2, 5, 6]; one of three wanted: those with a key under 1/3
    covariance, key = slopes.vector([0.5, 1, 2, 5, 6]), slopes.vector([0.0, 0.3, 0.4, 0.33, 0.0])
    assert random_selection(covariance, key, low=1.0, high=5.0, num_eligible=3, num_wanted=1).tolist() == [False, True, False, True, False]
    assert not bool(random_selection(covariance, key, low=9.0, high=10.0, num_eligible=0, num_wanted=1).any())


def test_the_top_share_ends_at_a_threshold() -> None:
    assert top_threshold(slopes.vector([5, 1, 3, 2]), share=0.5) == 3.0
    assert top_threshold(slopes.vector([5, 1, 3, 2]), share=0.01) == 5.0
    assert top_threshold(torch.zeros(0), share=0.5) == math.inf


def test_selected_tokens_keep_their_value_and_lose_their_gradient() -> None:
    selected = torch.tensor([True, False])
    assert slopes.slope(lambda p: without_gradient(p * 3, selected), [1.0, 1.0]) == [0.0, 3.0]
    assert without_gradient(slopes.vector([1, 2]), selected).tolist() == [1.0, 2.0]


def test_selected_tokens_are_pulled_back_to_the_old_policy() -> None:
    # r = e^.1 = 1.10517, A 1: -1.10517; selected + 2 * .1
    old, advantage, selected = slopes.vector([-1, -1]), slopes.vector([1, 1]), torch.tensor([True, False])

    def loss(p: torch.Tensor) -> torch.Tensor:
        return kl_cov_loss(p, old, advantage, selected, coefficient=2.0)[0]

    assert loss(slopes.vector([-0.9, -0.9])).tolist() == pytest.approx([-1.1051709 + 0.2, -1.1051709])
    assert slopes.slope(loss, [-0.9, -1.2]) == pytest.approx(slopes.difference(loss, [-0.9, -1.2]), abs=1e-6)


@given(slopes.log_ratios)
def test_any_difference_is_finite(log_ratio: float) -> None:
    for chosen in (torch.tensor([True]), torch.tensor([False])):
        gradient = slopes.slope(partial(pulled, selected=chosen), [log_ratio])
        assert math.isfinite(gradient[0])


def pulled(p: torch.Tensor, *, selected: torch.Tensor) -> torch.Tensor:
    return kl_cov_loss(p, torch.zeros_like(p), torch.zeros_like(p), selected, coefficient=1.0)[0]
