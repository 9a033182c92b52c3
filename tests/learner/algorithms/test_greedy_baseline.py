"""ReMax by hand."""

from __future__ import annotations

import pytest

from learner.algorithms.greedy_baseline import greedy_baseline_advantages
from tests.learner.algorithms import slopes


def test_the_greedy_answers_reward_is_taken_off() -> None:
    assert greedy_baseline_advantages(slopes.vector([1, 0, 0.5]), greedy_reward=0.75).tolist() == [0.25, -0.75, -0.25]


def test_equal_samples_are_still_better_than_the_greedy_answer() -> None:
    assert greedy_baseline_advantages(slopes.vector([1, 1]), greedy_reward=0.0).tolist() == [1.0, 1.0]


def test_without_a_greedy_reward_there_is_no_baseline() -> None:
    with pytest.raises(ValueError, match="greedy_reward must be finite"):
        greedy_baseline_advantages(slopes.vector([1.0]), greedy_reward=float("nan"))
