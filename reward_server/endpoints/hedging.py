"""When a call that takes longer than most is made a second time (Dean and Barroso 2013, "The tail at scale", hedged requests). Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class HedgeRule:
    """Example: `HedgeRule(quantile=0.95, share=0.1, least_samples=20)`"""

    quantile: float = 0.95  # of measured latencies: a call that is older is made again
    share: float = 0.1  # of calls that may be hedged, over time; 0: none
    least_samples: int = 20  # latencies before any is


@dataclass(kw_only=True, slots=True)
class Hedging:
    """Told of each attempt's latency; asked once per attempt."""

    rule: HedgeRule
    num_hedges: int = 0
    num_won: int = 0  # hedges that answered first
    _latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=256))
    _saved: float = 1.0
    _after_s: float | None = None  # as of the last measurement
    _age: int = 0  # latencies since then

    def called(self) -> None:
        """An attempt began: it adds its share."""
        self._saved = min(10.0, self._saved + self.rule.share)

    def measured(self, latency_s: float) -> None:
        """An attempt succeeded after so long."""
        self._latencies_s.append(latency_s)
        self._age += 1

    def after_s(self) -> float | None:
        """Age at which the attempt is hedged; None: it is not (yet)."""
        if self.rule.share <= 0 or len(self._latencies_s) < self.rule.least_samples:
            return None
        if self._after_s is None or self._age >= 16:
            ordered = sorted(self._latencies_s)
            self._after_s = ordered[min(len(ordered) - 1, math.ceil(self.rule.quantile * len(ordered)) - 1)]
            self._age = 0
        return self._after_s

    def take(self) -> bool:
        """Whether the budget has a hedge, and takes it."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        self.num_hedges += 1
        return True
