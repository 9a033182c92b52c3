"""Whether a figure of a process stays flat: the rule that a soak is judged by.

Memory is flat when its fitted growth over the second half of the measurement is at most ALLOWANCE_MIB + RATE_MIB_PER_H x hours of that half.
The fit is the median of the slopes of all pairs of readings (Theil 1950, Sen 1968): a single reading that is off, or the one step that an
allocator takes, moves it little, and a steady leak moves it wholly. Descriptors and threads are flat when their highest number of the
last quarter is at most SPARE above that of the second quarter.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

ALLOWANCE_MIB = 6.0  # what an allocator may still settle by, however short the run
RATE_MIB_PER_H = 12.0
SPARE = 4  # descriptors or threads: connections of the very moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One look at a process. Example: `Reading(at_s=60.0, rss_mib=512.5, num_files=41, num_threads=18)`."""

    at_s: float  # since the first reading
    rss_mib: float
    num_files: int
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a soak says of one process. Example: see `judge`."""

    rss_first_mib: float
    rss_last_mib: float
    slope_mib_per_h: float  # over the second half
    growth_mib: float  # that slope over the length of the half
    allowed_mib: float
    files: tuple[int, int]  # highest of the second and of the last quarter
    threads: tuple[int, int]
    broken: tuple[str, ...]  # the rules that do not hold, in words; empty: flat


def slope_per_h(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Median slope of all pairs, per hour. Example: times 0, 1800, 3600 s and values 10, 11, 12 give 2."""
    points = sorted(zip(times_s, values, strict=True))
    slopes = [(v1 - v0) / (t1 - t0) * 3600 for (t0, v0), (t1, v1) in combinations(points, 2) if t1 > t0]
    if not slopes:
        raise ValueError(f"{len(points)} readings have no slope: let the soak run longer")
    return statistics.median(slopes)


def judge(name: str, readings: Sequence[Reading]) -> Verdict:
    """Raises ValueError for fewer than eight readings."""
    if len(readings) < 8:
        raise ValueError(f"{name} was looked at {len(readings)} times: the rule needs at least 8, let the soak run longer")
    half, quarter = len(readings) // 2, len(readings) // 4
    late = readings[half:]
    hours = (late[-1].at_s - late[0].at_s) / 3600
    slope = slope_per_h([r.at_s for r in late], [r.rss_mib for r in late])
    growth, allowed = slope * hours, ALLOWANCE_MIB + RATE_MIB_PER_H * hours
    files, threads = (_highest(readings, quarter, what) for what in ("num_files", "num_threads"))
    broken = []
    if growth > allowed:
        broken.append(f"memory of {name} grew by {growth:.1f} MiB over the second half ({slope:.1f} MiB/h), allowed are {allowed:.1f}")
    broken += [
        f"{what} of {name} rose from {before} to {after}, allowed are {SPARE} more"
        for what, (before, after) in (("file descriptors", files), ("threads", threads))
        if after > before + SPARE
    ]
    return Verdict(
        rss_first_mib=readings[0].rss_mib, rss_last_mib=readings[-1].rss_mib, slope_mib_per_h=slope, growth_mib=growth, allowed_mib=allowed,
        files=files, threads=threads, broken=tuple(broken),
    )  # fmt: skip


def _highest(readings: Sequence[Reading], quarter: int, what: str) -> tuple[int, int]:
    """The highest number in the second and in the last quarter."""
    second, last = readings[quarter : 2 * quarter], readings[-quarter:]
    return max(getattr(r, what) for r in second), max(getattr(r, what) for r in last)
