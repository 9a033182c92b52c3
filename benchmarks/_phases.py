"""Which piece of an update holds up an engine's steps: pieces (name, began, ended) against the ends of its steps, all on one clock.

A gap is the time between the ends of two steps, its excess what it has over the median gap. Of a gap's excess a piece is charged with the
share of the gap that lies in it. Pieces of several processes run at once, so charges overlap: they do not add up to what was lost.

    ends 0, 10, 20, 60, 70 ms and a piece from 30 to 60: gaps 10, 10, 40, 10, median 10; the excess of 30 in the gap 20..60, of which
    three quarters lie in the piece: charged with 22.5 ms
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Span = tuple[str, float, float]
NUM_LONGEST = 4


def gaps(ends: Sequence[float]) -> list[tuple[float, float]]:
    """From each step's end to the next one's. Seconds."""
    return list(pairwise(ends))


def charges(ends: Sequence[float], spans: Sequence[Span]) -> dict[str, dict[str, float]]:
    """By piece, in the order in which pieces first begin: how long it took in all, how often it was, what it is charged with, the longest gap
    that it touches, and the median gap inside it. Milliseconds."""
    if len(ends) < 2:
        return {}
    between = gaps(ends)
    median = statistics.median(b - a for a, b in between)
    found = {}
    for name in dict.fromkeys(name for name, _, _ in sorted(spans, key=lambda span: span[1])):
        mine = _union([(began, ended) for other, began, ended in spans if other == name])
        shares = [(b - a, _overlap(mine, a, b)) for a, b in between]
        touched = [gap for gap, inside in shares if inside > 0]
        found[name] = {
            "took_ms": _ms(sum(ended - began for began, ended in mine)), "times": sum(other == name for other, _, _ in spans),
            "charged_ms": _ms(sum(max(0.0, gap - median) * inside / gap for gap, inside in shares if inside > 0)),
            "longest_gap_ms": _ms(max(touched, default=0.0)), "median_gap_ms": _ms(statistics.median(touched) if touched else 0.0),
        }  # fmt: skip
    return found


def longest(ends: Sequence[float], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The longest gaps: when they began (after the first piece did), how long they are, and how much of each piece lies in them. Milliseconds."""
    if not spans or len(ends) < 2:
        return []
    origin, names = min(began for _, began, _ in spans), dict.fromkeys(name for name, _, _ in spans)
    found = []
    for a, b in sorted(gaps(ends), key=lambda gap: gap[0] - gap[1])[:NUM_LONGEST]:
        inside = {name: _ms(_overlap(_union([(began, ended) for other, began, ended in spans if other == name]), a, b)) for name in names}
        found.append({"at_ms": _ms(a - origin), "gap_ms": _ms(b - a), "pieces_ms": {name: value for name, value in inside.items() if value > 0}})
    return found


def lost_s(ends: Sequence[float], began: float, ended: float) -> float:
    """Seconds of steps that were not made between two times, at the pace of the median gap."""
    inside = [(max(a, began), min(b, ended), b - a) for a, b in gaps(ends) if a < ended and b > began]
    median = statistics.median(b - a for a, b in gaps(ends)) if len(ends) > 1 else 0.0
    return sum((high - low) * (1 - median / gap) for low, high, gap in inside)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
    return joined


def _overlap(spans: Sequence[tuple[float, float]], low: float, high: float) -> float:
    return sum(max(0.0, min(high, ended) - max(low, began)) for began, ended in spans)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
