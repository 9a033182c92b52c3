"""GAE against the double sum of its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.gae import generalized_advantages, packed_advantages
from tests.learner.algorithms import slopes


def test_two_steps_by_hand() -> None:
    # rewards 0, 1; values .5, .25; gamma .9, lambda .8: delta_1 = 1 - .25 = .75; delta_0 = .9 * .25 - .5 = -.275; A_0 = -.275 + .72 * .75 = .265
    advantages, returns = generalized_advantages(slopes.vector([0, 1]), slopes.vector([0.5, 0.25]), gamma=0.9, lam=0.8)
    assert advantages.tolist() == pytest.approx([0.265, 0.75])
    assert returns.tolist() == pytest.approx([0.765, 1.0])


def test_a_cut_off_trajectory_goes_on_with_the_critics_value() -> None:
    # delta = 0 + .5 * 4 - 1 = 1
    assert generalized_advantages(slopes.vector([0.0]), slopes.vector([1.0]), gamma=0.5, lam=1.0, last_value=4.0)[0].tolist() == [1.0]


@given(st.lists(st.tuples(slopes.numbers, slopes.numbers), max_size=7), st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_sum_of_discounted_differences(steps: list[tuple[float, float]], gamma: float, lam: float) -> None:
    r, v = [a for a, _ in steps], [b for _, b in steps] + [0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    expected = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(r))) for t in range(len(r))]
    assert generalized_advantages(slopes.vector(r), slopes.vector(v[:-1]), gamma=gamma, lam=lam)[0].tolist() == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.lists(st.tuples(slopes.numbers, slopes.numbers), min_size=1, max_size=6), max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_a_row_of_samples_gives_what_each_gives_by_itself(samples: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    flat = [token for sample in samples for token in sample]
    sequence = torch.tensor([number for number, sample in enumerate(samples) for _ in sample], dtype=torch.int64)
    rewards, values = slopes.vector([r for r, _ in flat]), slopes.vector([v for _, v in flat])
    advantages, returns = packed_advantages(rewards, values, sequence, gamma=gamma, lam=lam)
    alone = [generalized_advantages(slopes.vector([r for r, _ in sample]), slopes.vector([v for _, v in sample]), gamma=gamma, lam=lam) for sample in samples]
    assert advantages.tolist() == pytest.approx([float(a) for own, _ in alone for a in own], abs=1e-9)
    assert returns.tolist() == pytest.approx([float(r) for _, own in alone for r in own], abs=1e-9)


def test_without_a_critic_and_discount_it_is_the_reward_to_go() -> None:
    assert generalized_advantages(slopes.vector([1, 2, 3]), slopes.vector([0, 0, 0]), gamma=1.0, lam=1.0)[0].tolist() == [6.0, 5.0, 3.0]


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match=r"rewards \(2,\), values \(3,\)"):
        generalized_advantages(slopes.vector([0, 1]), slopes.vector([0, 1, 2]), gamma=1.0, lam=1.0)
