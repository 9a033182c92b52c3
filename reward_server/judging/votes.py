"""Several verdicts as one."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from reward_server.outcome import Outcome, Scored, Unscored

Reduce = Literal["median", "mean", "majority"]


def reduced(outcomes: Sequence[Outcome], *, how: Reduce, quorum: int) -> Outcome:
    """One outcome of several votes; unscored, with the first reason, where fewer than `quorum` could be had.

    majority: the most frequent value, of several equally frequent ones their mean. Parts: num_votes, and spread (largest minus smallest).
    Example: 7, 8, 3 by median: 7, with parts num_votes 3 and spread 5.
    """
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Scored)]
    if len(values) < quorum:
        first = next(outcome for outcome in outcomes if isinstance(outcome, Unscored))
        return first if len(outcomes) == 1 else Unscored(f"{len(values)} of {len(outcomes)} votes, fewer than quorum={quorum}; the first that failed: {first.detail}", first.reason)
    parts = {"num_votes": float(len(values)), "spread": max(values) - min(values)} if len(outcomes) > 1 else {}
    return Scored(value=_one(values, how), parts=parts)


def _one(values: Sequence[float], how: Reduce) -> float:
    if how == "median":
        return statistics.median(values)
    if how == "mean":
        return statistics.fmean(values)
    counted = Counter(values)
    most = max(counted.values())
    return statistics.fmean(value for value, count in counted.items() if count == most)
