"""The admitted staleness bound follows the measured mismatch, within given limits."""

from __future__ import annotations

import math


def adapted_bound(bound: int, mismatch: float, *, target: float, lowest: int, highest: int, slack: float = 0.5) -> int:
    """The next step's bound: one less where mismatch > target, one more where mismatch < slack * target, else the same; within [lowest, highest].

    A mismatch that is not finite counts as too large. One step at a time, with a dead band between slack * target and target, so that it does not swing.
    Raises ValueError unless 0 <= lowest <= highest, target > 0 and 0 <= slack < 1.
    """
    if not (0 <= lowest <= highest and target > 0 and 0 <= slack < 1):
        raise ValueError(f"lowest={lowest}, highest={highest}, target={target}, slack={slack}: needs 0 <= lowest <= highest, target > 0 and 0 <= slack < 1")
    if not math.isfinite(mismatch) or mismatch > target:
        bound -= 1
    elif mismatch < slack * target:
        bound += 1
    return min(max(bound, lowest), highest)
