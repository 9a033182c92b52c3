"""Importance weights by hand: every level and every mode."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.correction import bounded_weight, leveled_ratio, veto
from tests.learner.algorithms import slopes

SEQUENCE = torch.tensor([0, 0, 1])
LOG_RATIO = [0.3, -0.1, 0.5]


@pytest.mark.parametrize(("level", "expected"), [("token", [0.3, -0.1, 0.5]), ("sequence", [0.2, 0.2, 0.5]), ("geometric", [0.1, 0.1, 0.5])])
def test_levels(level, expected: list[float]) -> None:
    found = leveled_ratio(slopes.vector(LOG_RATIO), SEQUENCE, num_sequences=2, level=level)
    assert found.tolist() == pytest.approx([math.exp(d) for d in expected])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("truncate", [0.25, 1.0, 2.0, 2.0]), ("clip", [0.5, 1.0, 2.0, 2.0]), ("mask", [0.0, 1.0, 2.0, 0.0]), ("reject", [0.0, 1.0, 1.0, 0.0])],
)
def test_modes(mode, expected: list[float]) -> None:
    assert bounded_weight(slopes.vector([0.25, 1.0, 2.0, 4.0]), mode=mode, low=0.5, high=2.0).tolist() == expected


def test_a_long_samples_ratio_is_bounded_in_log_space() -> None:
    # faults.md 46: .012 a token: 100 tokens e^1.2 = 3.32, 1,000 tokens e^12 = 162,755; 1e6 tokens would be inf
    for n, expected in ((100, 3.3201), (1000, 162754.79)):
        d = torch.full((n,), 0.012, dtype=torch.float64)
        assert float(leveled_ratio(d, torch.zeros(n, dtype=torch.int64), num_sequences=1, level="sequence")[0]) == pytest.approx(expected, rel=1e-4)
    d = torch.full((100_000,), 0.012, dtype=torch.float32)
    assert slopes.finite(leveled_ratio(d, torch.zeros(100_000, dtype=torch.int64), num_sequences=1, level="sequence"))


def test_no_gradient_flows_through_a_weight() -> None:
    d = slopes.vector(LOG_RATIO, grad=True)
    for level in ("token", "sequence", "geometric"):
        assert not leveled_ratio(d, SEQUENCE, num_sequences=2, level=level).requires_grad
    assert not veto(d, SEQUENCE, num_sequences=2, lowest=0.1).requires_grad


def test_one_outlier_vetoes_its_whole_sample_and_no_other() -> None:
    # ratios 1, 1e-5 | 1 with lowest 1e-4
    assert veto(slopes.vector([0, math.log(1e-5), 0]), SEQUENCE, num_sequences=2, lowest=1e-4).tolist() == [0.0, 0.0, 1.0]
    assert veto(slopes.vector([0, 0, float("nan")]), SEQUENCE, num_sequences=2, lowest=1e-4).tolist() == [1.0, 1.0, 0.0]


@given(st.lists(slopes.log_ratios, min_size=3, max_size=3))
def test_any_difference_gives_a_weight_within_bounds(log_ratio: list[float]) -> None:
    for level in ("token", "sequence", "geometric"):
        ratio = leveled_ratio(slopes.vector(log_ratio), SEQUENCE, num_sequences=2, level=level)
        for mode in ("truncate", "clip", "mask", "reject"):
            weight = bounded_weight(ratio, mode=mode, low=0.5, high=2.0)
            assert slopes.finite(weight) and float(weight.min()) >= 0 and float(weight.max()) <= 2


def test_the_untruncated_weight_makes_an_off_policy_mean_the_on_policy_one() -> None:
    # behaviour .5 .5, target .8 .2, values 1, 0: sum q w v = .8
    w = leveled_ratio(slopes.vector([math.log(0.8 / 0.5), math.log(0.2 / 0.5)]), torch.tensor([0, 1]), num_sequences=2, level="token")
    assert float((0.5 * w * slopes.vector([1, 0])).sum()) == pytest.approx(0.8)
