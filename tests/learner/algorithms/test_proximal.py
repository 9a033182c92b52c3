"""The log-linear proximal policy and the age of tokens, by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.proximal import log_linear_proximal, token_staleness
from tests.learner.algorithms import slopes


def test_it_lies_where_the_step_began_on_the_way_from_sampler_to_trainer() -> None:
    # behaviour -2, now -1: age 0: -2; age 1: half way, -1.5; age 3: three quarters, -1.25
    found = log_linear_proximal(slopes.vector([-1, -1, -1], grad=True), slopes.vector([-2, -2, -2]), torch.tensor([0, 1, 3]))
    assert found.tolist() == [-2.0, -1.5, -1.25] and not found.requires_grad


def test_tokens_of_newer_versions_are_younger() -> None:
    # oldest token 2 steps old, drawn by version 7; version 8 is 1 step old, 9 none, 10 (a snapshot published again) not below 0
    assert token_staleness(2, torch.tensor([7, 7, 8, 9, 10])).tolist() == [2, 2, 1, 0, 0]
    assert token_staleness(2, torch.zeros(0, dtype=torch.int64)).tolist() == []


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.integers(0, 8)), max_size=5))
def test_it_is_the_formula_written_out(tokens: list[tuple[float, float, int]]) -> None:
    now, then, age = ([t[i] for t in tokens] for i in range(3))
    expected = [b + s / (s + 1) * (a - b) for a, b, s in zip(now, then, age, strict=True)]
    assert log_linear_proximal(slopes.vector(now), slopes.vector(then), torch.tensor(age, dtype=torch.int64)).tolist() == pytest.approx(expected, abs=1e-12)
