"""What a pool is told of its scorers, and what it learns of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reward_server.outcome import Answered, Unscored

_PACE_WEIGHT = 0.2  # of the newest time in the running mean


@dataclass(frozen=True, kw_only=True, slots=True)
class ScorerSpec:
    """One scorer to be run.

    Example: `ScorerSpec(name="sums", use="last_number", args={"field": "answer"}, limit_s=10.0)`
    """

    name: str
    use: str  # built-in name or "module:function"
    args: dict[str, Any]
    limit_s: float  # wall-clock limit of one call


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of a pool; fields as in RewardConfig."""

    workers: int = 1
    spares: int = 1
    max_slow: int = 8
    patience_s: float = 0.25
    memory_bytes: int = 4 << 30  # 0: not bounded
    load_limit_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a process says of a scorer that it has loaded.

    Example: `Told(description="Counts words.", is_async=False, version="3f2a", is_deterministic=True)`
    """

    description: str
    is_async: bool
    version: str  # digest of the file that the function is defined in; empty: there is none
    is_deterministic: bool


@dataclass(kw_only=True, slots=True)
class Account:
    """What the pool knows of one scorer."""

    spec: ScorerSpec
    description: str = ""
    is_async: bool = False
    version: str = ""
    is_deterministic: bool = True
    has_changed: bool = False  # a process started later found another version of its file: two of them may be at work
    num_answered: int = 0  # unscored ones included
    num_unscored: int = 0
    num_busy: int = 0  # processes at its calls, without the slow ones
    num_slow: int = 0
    pace_s: float = 0.001  # running mean of a sync call's time
    blocked_until_s: float = 0.0  # loop time until which its async calls go one by one

    def count(self, outcome: Answered) -> None:
        """Adds an answer that somebody got."""
        self.num_answered += 1
        self.num_unscored += isinstance(outcome, Unscored)

    def turn_slow(self) -> None:
        """One of its processes outlasted the patience."""
        self.num_busy -= 1
        self.num_slow += 1

    def leave(self, *, was_slow: bool, took_s: float) -> None:
        """One of its processes is done; took_s: time of one call."""
        if was_slow:
            self.num_slow -= 1
        else:
            self.num_busy -= 1
        self.pace_s += _PACE_WEIGHT * (took_s - self.pace_s)
