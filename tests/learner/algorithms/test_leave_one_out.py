"""RLOO by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from learner.algorithms.leave_one_out import leave_one_out_advantages
from tests.learner.algorithms import slopes


def test_each_sample_is_measured_against_the_mean_of_the_others() -> None:
    # 1 - 0, 0 - 1/3 three times
    assert leave_one_out_advantages(slopes.vector([1, 0, 0, 0])).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_others_leave_no_float_noise(dtype: torch.dtype) -> None:
    # faults.md 63: seven of .95: the odd one out is -.95, and no deviation of the others is ever divided by
    values = leave_one_out_advantages(torch.tensor([0, *[0.95] * 7], dtype=dtype)).tolist()
    assert values[0] == pytest.approx(-0.95) and values[1:] == pytest.approx([0.95 / 7] * 7)


@given(slopes.rewards)
def test_any_group_gives_the_formula_or_exactly_zero(values: list[float]) -> None:
    found = leave_one_out_advantages(slopes.vector(values)).tolist()
    if max(values) - min(values) < 1e-6:
        assert found == [0.0] * len(values)
    else:
        expected = [v - (sum(values) - v) / (len(values) - 1) for v in values]
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert sum(found) == pytest.approx(0, abs=1e-8)
