"""Entropy against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.entropy import token_entropy
from tests.learner.algorithms import slopes


def test_uniform_and_certain() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -1e9, -1e9, -1e9], [3.0, float("-inf"), 3.0, float("-inf")]])
    assert token_entropy(logits).tolist() == pytest.approx([math.log(4), 0.0, math.log(2)])


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6))
def test_it_is_minus_the_sum_of_p_log_p(logits: list[float]) -> None:
    weights = [math.exp(z - max(logits)) for z in logits]
    p = [w / sum(weights) for w in weights]
    expected = -sum(x * math.log(x) for x in p if x > 0)
    assert float(token_entropy(slopes.vector(logits)[None])) == pytest.approx(expected, abs=1e-9)


def test_gradient_is_that_of_finite_differences() -> None:
    point = [0.3, -1.0, 2.0]
    assert slopes.slope(lambda z: token_entropy(z[None]), point) == pytest.approx(slopes.difference(lambda z: token_entropy(z[None]), point), abs=1e-6)


def test_large_logits_are_finite() -> None:
    assert slopes.finite(token_entropy(torch.tensor([[1e30, -1e30, 0.0]])))
