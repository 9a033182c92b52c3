"""Returns by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.returns import token_returns, turn_returns
from tests.learner.algorithms import slopes


def test_a_later_reward_is_discounted_by_its_distance() -> None:
    # 1 + .5 * (0 + .5 * 4) = 2, 2, 4
    assert token_returns(slopes.vector([1, 0, 4]), gamma=0.5).tolist() == [2.0, 2.0, 4.0]


@given(st.lists(slopes.numbers, max_size=8), st.floats(0, 1))
def test_it_is_the_discounted_sum(rewards: list[float], gamma: float) -> None:
    expected = [sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))]
    assert token_returns(slopes.vector(rewards), gamma=gamma).tolist() == pytest.approx(expected, abs=1e-9)


def test_a_turn_is_discounted_once_however_long_it_is() -> None:
    # turns of 3 and 1 tokens, rewards 1 and 4, gamma .5: 1 + .5 * 4 = 3 for each token of the first
    assert turn_returns(slopes.vector([1, 4]), torch.tensor([0, 0, 0, 1]), gamma=0.5).tolist() == [3.0, 3.0, 3.0, 4.0]
    assert turn_returns(slopes.vector([1]), torch.zeros(0, dtype=torch.int64), gamma=0.5).tolist() == []


def test_a_turn_without_a_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="turns 0 to 2, but there are 2"):
        turn_returns(slopes.vector([1, 4]), torch.tensor([0, 2]), gamma=0.5)
