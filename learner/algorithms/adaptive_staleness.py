"""The admitted staleness bound follows the measured mismatch, within given limits."""

from __future__ import annotations

import math


def adapted_bound(bound: int, mismatch: float, *, low: float, high: float, lowest: int, highest: int) -> int:
    """The next step's bound: one less where mismatch > high, one more where mismatch < low, else the same; within [lowest, highest].

    A mismatch that is not finite counts as too large. One step at a time, with a dead band between low and high, so that it does not swing.
    Raises ValueError unless 0 <= lowest <= highest and 0 <= low <= high.
    """
    if not (0 <= lowest <= highest and 0 <= low <= high):
        raise ValueError(f"lowest={lowest}, highest={highest}, low={low}, high={high}: needs 0 <= lowest <= highest and 0 <= low <= high")
    if not math.isfinite(mismatch) or mismatch > high:
        bound -= 1
    elif mismatch < low:
        bound += 1
    return min(max(bound, lowest), highest)
