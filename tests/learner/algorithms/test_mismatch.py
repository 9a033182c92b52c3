"""Mismatch between trainer and sampler, by hand."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.mismatch import mismatch_summary


def test_summary_of_no_update_is_zero() -> None:
    # faults.md 46
    summary = mismatch_summary(torch.zeros(7), clip_low=0.2, clip_high=0.2)
    assert {name: float(value) for name, value in summary.items()} == {**dict.fromkeys(summary, 0.0), "ess": 1.0}


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


def test_effective_sample_size_falls_where_one_token_outweighs_the_rest() -> None:
    # ratios 1, 1, 1, 3: 6^2 / (4 * 12) = .75; all alike: 1, whatever the common ratio
    assert float(mismatch_summary(torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64).log(), clip_low=0.2, clip_high=0.2)["ess"]) == pytest.approx(0.75)
    assert float(mismatch_summary(torch.full((5,), 0.7), clip_low=0.2, clip_high=0.2)["ess"]) == pytest.approx(1.0)
