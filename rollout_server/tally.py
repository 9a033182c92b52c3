"""What is counted of a replica since it started: how requests ended, and what updates cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ENGINE_ENDS = ("died", "stalled")
ENDS = ("stop", "length", "abort", "cancelled", "failed", "refused")


@dataclass(kw_only=True, slots=True)
class Tally:
    """Mutable: the replica owns it. Example: `Tally().updated({"pause": 0.01, "apply": 0.02})`"""

    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))  # requests by how they ended
    engine_ends: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENGINE_ENDS, 0)))  # lives of the engine by why they ended
    num_loaded: int = 0  # versions that were loaded
    pieces_s: Counter[str] = field(default_factory=Counter)  # time in which nothing was drawn for an update, by piece

    def updated(self, pieces_s: dict[str, float]) -> None:
        """A version was loaded; pieces of its pause."""
        self.num_loaded += 1
        for name, seconds in pieces_s.items():
            self.pieces_s[name] += seconds  # type: ignore[assignment]  # a Counter of seconds
