"""The last while of some figures, and what Prometheus' functions would make of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]  # one value for each set of labels
Reading = Mapping[str, Vector]  # by name of the figure


def labels(**given: str) -> Labels:
    """Example: `labels(replica="a")`"""
    return frozenset(given.items())


@dataclass(kw_only=True, slots=True)
class _Rise:
    """How a counter rose over some readings. Mutable while they are gone through."""

    first_s: float
    first: float
    last_s: float
    last: float
    increase: float = 0.0  # resets taken into account
    num_readings: int = 1

    def add(self, at_s: float, value: float) -> None:
        self.increase += value - self.last if value >= self.last else value
        self.last_s, self.last, self.num_readings = at_s, value, self.num_readings + 1

    @property
    def lasted_s(self) -> float:
        return self.last_s - self.first_s

    def extrapolated(self, now_s: float, over_s: float) -> float:
        pause_s = self.lasted_s / (self.num_readings - 1)
        to_start_s = self.first_s - (now_s - over_s)
        if self.increase > 0 and self.first >= 0:
            to_start_s = min(to_start_s, self.lasted_s * self.first / self.increase)  # a counter was never below 0
        stretched_s = self.lasted_s + sum(end_s if end_s < 1.1 * pause_s else pause_s / 2 for end_s in (to_start_s, now_s - self.last_s))
        return self.increase * stretched_s / self.lasted_s / over_s


class Window:
    """Readings in order of time, each figure for as long as somebody looks back at it.

    Example: `window = Window({"headrace_gateway_step_age_seconds": 60.0}); window.add(12.0, {"headrace_gateway_step_age_seconds": {labels(): 3.0}})`
    """

    def __init__(self, horizons_s: Mapping[str, float]) -> None:
        """horizons_s: how far back each figure is asked for; others are not kept."""
        self._horizons_s = dict(horizons_s)
        self._kept: dict[str, deque[tuple[float, Vector]]] = {name: deque() for name in horizons_s}
        self.now_s = 0.0  # of the newest reading

    def add(self, now_s: float, reading: Reading) -> None:
        """A figure that is missing has no value at this moment."""
        self.now_s = now_s
        for name, kept in self._kept.items():
            kept.append((now_s, reading.get(name, {})))
            while len(kept) > 1 and kept[0][0] < now_s - self._horizons_s[name]:
                kept.popleft()

    def newest(self, name: str) -> Vector:
        kept = self._kept[name]
        return dict(kept[-1][1]) if kept else {}

    def mean(self, name: str, over_s: float, ago_s: float = 0.0) -> Vector:
        """avg_over_time(name[over_s] offset ago_s): of each set of labels, over the moments at which it had a value."""
        sums: dict[Labels, tuple[float, int]] = {}
        for _, values in self._between(name, over_s, ago_s):
            for key, value in values.items():
                total, count = sums.get(key, (0.0, 0))
                sums[key] = (total + value, count + 1)
        return {key: total / count for key, (total, count) in sums.items()}

    def speed(self, name: str, over_s: float) -> Vector:
        """Of a counter: its increase a second between the first and the last moment at which it had a value in this time; one that fell was
        reset to 0 in between. None of a set of labels with fewer than two values."""
        return {key: rise.increase / rise.lasted_s for key, rise in self._rises(name, over_s).items() if rise.lasted_s > 0}

    def rate(self, name: str, over_s: float) -> Vector:
        """rate(name[over_s]) as Prometheus reckons it: the increase is stretched to the ends of the time where the readings come close to
        them, and not where the counter is younger than that (extrapolatedRate in its promql/functions.go)."""
        return {key: rise.extrapolated(self.now_s, over_s) for key, rise in self._rises(name, over_s).items() if rise.lasted_s > 0}

    def _rises(self, name: str, over_s: float) -> dict[Labels, _Rise]:
        rises: dict[Labels, _Rise] = {}
        for at_s, values in self._between(name, over_s, 0.0):
            for key, value in values.items():
                if key in rises:
                    rises[key].add(at_s, value)
                else:
                    rises[key] = _Rise(first_s=at_s, first=value, last_s=at_s, last=value)
        return rises

    def _between(self, name: str, over_s: float, ago_s: float) -> list[tuple[float, Vector]]:
        end_s = self.now_s - ago_s
        return [(at_s, values) for at_s, values in self._kept[name] if end_s - over_s <= at_s <= end_s]
