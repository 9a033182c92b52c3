"""What is said of differences between an engine's log-probs and the trainer's."""

from __future__ import annotations

import pytest

from benchmarks.quantized import bars_of, summary


def test_differences_are_summed_up_by_size_bias_and_what_the_clip_takes() -> None:
    # ratios trainer / engine: e^-0.1 = 0.905 lies inside 1 +- 0.2, e^0.3 = 1.35 does not
    assert summary([0.1, -0.3]) == {"tokens": 2, "mean": pytest.approx(0.2), "largest": 0.3, "kl": pytest.approx(-0.1), "clipped": 0.5}


def test_an_update_may_not_widen_the_mismatch_and_what_failed_has_no_bar() -> None:
    seen = {"mean": 0.02, "largest": 0.1}
    table = {"fp8": {"before": seen, "updated": {**seen, "mean": 0.04}}, "mxfp8": {"failed": "no"}, "float32": {"before": {"mean": 0, "largest": 1e-6}, "updated": {"mean": 0, "largest": 0.2}}}
    assert {bar.name: (bar.value, bar.passed) for bar in bars_of(table)} == {
        "fp8_updated_vs_before": (2.0, False), "float32_before_largest_nat": (1e-6, True), "float32_updated_largest_nat": (0.2, False)
    }  # fmt: skip
