"""Mismatch between trainer and sampler, by hand."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.mismatch import kl_k1, kl_k3, mismatch_summary


@pytest.mark.parametrize(("log_ratio", "expected"), [(0.1, 0.0051709), (1.0, 0.7182818), (0.0, 0.0)])
def test_k3_is_exp_minus_one_minus_itself(log_ratio: float, expected: float) -> None:
    # faults.md 84
    assert float(kl_k3(torch.tensor(log_ratio, dtype=torch.float64))) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_k3_of_a_huge_difference_has_finite_value_and_gradient(log_ratio: float) -> None:
    # faults.md 84
    value = torch.tensor(log_ratio, requires_grad=True)
    kl_k3(value).backward()
    assert value.grad is not None and bool(torch.isfinite(kl_k3(value))) and bool(torch.isfinite(value.grad))
    assert bool(torch.isnan(kl_k3(torch.tensor(float("nan")))))


def test_k1_is_the_negative_difference() -> None:
    assert kl_k1(torch.tensor([0.3, -0.2])).tolist() == pytest.approx([-0.3, 0.2])


def test_summary_of_no_update_is_zero() -> None:
    # faults.md 46
    summary = mismatch_summary(torch.zeros(7), clip_low=0.2, clip_high=0.2)
    assert all(float(value) == 0 for value in summary.values())


def test_percentiles_are_nearest_ranks_of_the_absolute_difference() -> None:
    # |d| of 10 values .01 .. .10: the smallest with at least half at or below it is .05, of 90 % .09, of 99 % .10
    values = torch.tensor([(-1) ** i * (i + 1) / 100 for i in range(10)], dtype=torch.float64)
    summary = {name: float(value) for name, value in mismatch_summary(values, clip_low=0.2, clip_high=0.2).items()}
    assert (summary["abs_p50"], summary["abs_p90"], summary["abs_p99"], summary["abs_max"]) == pytest.approx((0.05, 0.09, 0.10, 0.10))


def test_share_beyond_the_clip_counts_both_sides() -> None:
    # ratios .5, 1, 1.25, 1.3 against [.8, 1.28]: two of four are outside
    values = torch.tensor([0.5, 1.0, 1.25, 1.3]).log()
    assert float(mismatch_summary(values, clip_low=0.2, clip_high=0.28)["beyond_clip_share"]) == 0.5


def test_no_token_gives_no_summary() -> None:
    assert mismatch_summary(torch.zeros(0), clip_low=0.2, clip_high=0.2) == {}
