"""Advantages worked by hand; population standard deviation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.advantages import group_advantages
from learner.algorithms.rewards import has_signal
from tests.learner.algorithms import slopes


def advantages(rewards: list[float], normalize: bool = True, dtype: torch.dtype = torch.float64) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=dtype), normalize=normalize).tolist()


def test_one_success_of_four_gives_root_three() -> None:
    # mean .25, population std sqrt(.75 * .25) = .4330; .75 / .4330 = 1.7320, -.25 / .4330 = -.5774
    assert advantages([1, 0, 0, 0]) == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


def test_one_failure_of_four_is_a_negative_signal_of_the_same_size() -> None:
    # faults.md 58: the completion of only a stop token gets -1.732
    assert advantages([1, 0, 1, 1])[1] == pytest.approx(-1.7320508)


def test_without_normalisation_it_is_the_distance_from_the_mean() -> None:
    assert advantages([1, 0, 0, 0], normalize=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nearly_constant_group_does_not_explode(dtype: torch.dtype) -> None:
    # faults.md 63: [0, .95 x 7]: mean .83125, population std .95 sqrt(7)/8 = .31418; -.83125 / .31418 = -2.6458 = -sqrt(7)
    values = advantages([0, *[0.95] * 7], dtype=dtype)
    assert values[0] == pytest.approx(-math.sqrt(7), rel=1e-6)
    assert values[1:] == pytest.approx([1 / math.sqrt(7)] * 7, rel=1e-6)


def test_a_small_but_real_spread_is_not_shrunk_by_a_floor() -> None:
    # faults.md 64: two values are always one standard deviation from their mean, here of 5e-6
    assert advantages([1.00000, 1.00001]) == pytest.approx([-1.0, 1.0])


def test_float_noise_on_equal_rewards_is_exactly_zero() -> None:
    # faults.md 65: a spread of 1.19e-7 is under the tolerance of 1e-6; 1e-5 is above
    assert advantages([1, 1, 1, 1 + 1e-7], dtype=torch.float32) == [0.0] * 4
    assert not has_signal(torch.tensor([1, 1, 1, 1 + 1e-7], dtype=torch.float32))
    assert has_signal(torch.tensor([1.0, 1.00001], dtype=torch.float64))


@pytest.mark.parametrize(("rewards", "signal"), [([0.4] * 4, False), ([0.3, 0.5, 0.4, 0.4], True), ([1.0] * 4, False), ([0.0] * 4, False)])
def test_signal_is_spread_and_not_the_mean(rewards: list[float], signal: bool) -> None:
    # faults.md 66
    assert has_signal(torch.tensor(rewards)) is signal
    assert any(advantages(rewards)) is signal


def test_a_group_of_one_has_no_advantage() -> None:
    assert advantages([5.0]) == [0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        advantages([1.0, bad])


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="num_usable"):
        group_advantages(torch.zeros(2, 2), normalize=True)


def test_the_deviation_of_the_sample_divides_by_one_less() -> None:
    # mean .25, squares .5625 + 3 * .0625 = .75; / 3 = .25; sqrt .5: 1.5, -.5, -.5, -.5
    assert group_advantages(torch.tensor([1.0, 0, 0, 0]), normalize=True, ddof=1).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    # faults.md 64: [1, 1.00001]: mean distance 5e-6, sample deviation 7.0711e-6: .70711, not .0050
    assert group_advantages(torch.tensor([1.00000, 1.00001], dtype=torch.float64), normalize=True, ddof=1).tolist() == pytest.approx([-0.70711, 0.70711], abs=1e-4)


@given(slopes.rewards, st.sampled_from([0, 1]))
def test_any_group_gives_the_formula_or_exactly_zero(values: list[float], ddof: int) -> None:
    found = group_advantages(torch.tensor(values, dtype=torch.float64), normalize=True, ddof=ddof).tolist()
    if max(values) - min(values) < 1e-6:
        assert found == [0.0] * len(values)
    else:
        mean = sum(values) / len(values)
        assert found == pytest.approx([(v - mean) / slopes.std(values, ddof) for v in values], rel=1e-6, abs=1e-6)
