"""What is counted of a replica since it started: how requests ended, and what updates cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ENGINE_ENDS = ("died", "stalled")
ENDS = ("stop", "length", "abort", "cancelled", "failed", "refused")


class Occupancy:
    """How many samples are somewhere now, and the time that samples have spent there, those under way included.

    Example: `with tally.scoring.of(1): await score()`
    """

    def __init__(self) -> None:
        self.num_now = 0
        self._seconds = 0.0
        self._since_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Summed over samples: two of them for three seconds are six."""
        return self._seconds + self.num_now * (time.monotonic() - self._since_s)

    @contextmanager
    def of(self, num_samples: int) -> Iterator[None]:
        self._change(num_samples)
        try:
            yield
        finally:
            self._change(-num_samples)

    def _change(self, num_samples: int) -> None:
        self._seconds, self._since_s = self.seconds, time.monotonic()
        self.num_now += num_samples


@dataclass(kw_only=True, slots=True)
class Tally:
    """Mutable: the replica owns it. Example: `Tally().updated({"pause": 0.01, "apply": 0.02})`"""

    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))  # requests by how they ended
    engine_ends: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENGINE_ENDS, 0)))  # lives of the engine by why they ended
    num_loaded: int = 0  # versions that were loaded
    pieces_s: Counter[str] = field(default_factory=Counter)  # time in which nothing was drawn for an update, by piece
    drawing: Occupancy = field(default_factory=Occupancy)  # samples of a learner's run at the engine
    scoring: Occupancy = field(default_factory=Occupancy)  # samples of a learner's run that wait for their score
    num_scored: int = 0  # samples that got one
    num_unscored: int = 0  # samples that got a reason why there is none

    def updated(self, pieces_s: dict[str, float]) -> None:
        """A version was loaded; pieces of its pause."""
        self.num_loaded += 1
        for name, seconds in pieces_s.items():
            self.pieces_s[name] += seconds  # type: ignore[assignment]  # a Counter of seconds

    def answered(self, *, scored: bool) -> None:
        """A sample got its score, or the reason why there is none."""
        self.num_scored += scored
        self.num_unscored += not scored
