"""What the gateway counts for its figures alone: the outcome of pushes and loads, the time of steps, the use of GPUs within a step."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class PushCounters:
    """Fed with the lines of pushes.jsonl and loads.jsonl. Example: `PushCounters().load({"transfer_s": 0.1, "pause_s": 0.02, "pieces_s": {}})`"""

    outcomes: Counter[str] = field(default_factory=Counter)  # of replicas in epochs, by phase
    num_epochs: int = 0
    seconds: float = 0.0  # of epochs: the slowest rank's sending
    num_bytes: int = 0  # sent by all ranks
    num_loads: int = 0
    transfer_s: float = 0.0
    pieces_s: dict[str, float] = field(default_factory=dict)  # of all pauses, by piece

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is over."""
        self.num_epochs += 1
        self.outcomes.update(member["phase"] for member in line["members"])
        self.seconds += max((rank.get("seconds", 0.0) for rank in line["ranks"]), default=0.0)
        self.num_bytes += sum(rank.get("bytes_rooted", 0) for rank in line["ranks"])

    def load(self, line: dict[str, Any]) -> None:
        """A replica loaded a version. A pause that was told without its pieces counts as one piece, "pause"."""
        self.num_loads += 1
        self.transfer_s += line["transfer_s"]
        for name, seconds in (line["pieces_s"] or {"pause": line["pause_s"]}).items():
            self.pieces_s[name] = self.pieces_s.get(name, 0.0) + seconds


@dataclass(kw_only=True, slots=True)
class StepClock:
    """When the last step closed, and how the learner's GPUs were used in it.

    Example: samples 0.2 and 0.4 of use, then `closed()`: `use` is 0.3 and `num_low` 1.
    """

    since_s: float = field(default_factory=time.monotonic)  # of the last publication; before the first, of the start
    low_use: float = 0.5  # mean use of the learner's GPUs within a step, below which it counts as one of low use
    use: float | None = None  # mean over the last step; None: no sample yet
    num_low: int = 0  # steps in a row with a use under low_use
    _sum: float = 0.0
    _count: int = 0

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.since_s

    def sample(self, uses: list[float]) -> None:
        """The use of each GPU at one moment."""
        if uses:
            self._sum, self._count = self._sum + sum(uses) / len(uses), self._count + 1

    def closed(self) -> None:
        """A version was published. A step that no sample fell into is taken to be as the one before."""
        self.since_s = time.monotonic()
        if self._count:
            self.use = self._sum / self._count
        if self.use is not None:
            self.num_low = self.num_low + 1 if self.use < self.low_use else 0
        self._sum, self._count = 0.0, 0
