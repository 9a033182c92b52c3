"""How scores become one score. Pure: a rule is asked again as scores come, and says which it still needs, or the number.

The parts keep the scores as they were before weights; the value is what weights, gates and clips made of them, and it is the value that
is trained on and logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from reward_server.outcome import MAX_PARTS, Outcome, Scored, Unscored

_LEAST_DEVIATION = 1e-8
Known = Mapping[str, Scored]
Needed = tuple[str, ...]


class Rule(Protocol):
    """`decide` gives the names of scorers that must be asked first, or the outcome. Called once more after each round of answers."""

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Example: `Sum(weights={"right": 0.7, "short": 0.3})` of 1 and 0 is 0.7."""

    weights: Mapping[str, float]

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        return _missing(known, *self.weights) or _total([weight * known[name].value for name, weight in self.weights.items()])


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Example: `Product(of=("right", "short"))` of 0.5 and 0.5 is 0.25."""

    of: tuple[str, ...]

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        return _missing(known, *self.of) or math.prod(known[name].value for name in self.of)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Example: `Gate(of="judge", by="format", at_least=1.0, otherwise=-1.0)` is -1 for a bad format, and the judge is not asked."""

    of: str
    by: str
    at_least: float
    otherwise: float

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        if missing := _missing(known, self.by):
            return missing
        if known[self.by].value < self.at_least:
            return self.otherwise
        return _missing(known, self.of) or known[self.of].value


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Example: `Clip(of="judge", low=0.0, high=1.0)`."""

    of: str
    low: float
    high: float

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        return _missing(known, self.of) or min(self.high, max(self.low, known[self.of].value))


@dataclass(kw_only=True, slots=True)
class Normalise:
    """(x − mean) ÷ population standard deviation, of the scores so far, x included, with exponential forgetting.

    West 1979, "Updating mean and variance estimates", with weights that halve every `halflife` scores. Example: 1, then 3, no forgetting:
    the second has mean 2 and deviation 1 and becomes 1. A score so large that the statistics would overflow is none (NaN), and they forget it.
    """

    of: str
    halflife: float
    warm_up: int
    num_seen: int = 0
    mean: float = 0.0
    _weight: float = 0.0
    _squares: float = field(default=0.0)

    @property
    def deviation(self) -> float:
        return math.sqrt(self._squares / self._weight) if self._weight else 0.0

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        if missing := _missing(known, self.of):
            return missing
        value = known[self.of].value
        if not self._note(value):
            return math.nan
        deviation = self.deviation if self.num_seen > self.warm_up else 1.0
        return (value - self.mean) / deviation if deviation > _LEAST_DEVIATION else 0.0

    def _note(self, value: float) -> bool:
        """Whether the statistics can hold the score; if not, they stay as they were."""
        keep = 0.5 ** (1.0 / self.halflife)
        weight, off = self._weight * keep + 1.0, value - self.mean
        mean = self.mean + off / weight
        squares = self._squares * keep + off * (value - mean)
        if not (math.isfinite(mean) and math.isfinite(squares)):
            return False
        self.num_seen, self._weight, self.mean, self._squares = self.num_seen + 1, weight, mean, squares
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Example: `Route(by="dataset", to={"gsm8k": "math"}, otherwise="judge")`."""

    by: str
    to: Mapping[str, str]
    otherwise: str  # empty: there is none

    def decide(self, known: Known, fields: Mapping[str, Any]) -> Needed | float | Unscored:
        if self.by not in fields and not self.otherwise:
            return Unscored(f"the record has no field {self.by!r}, by which the scorer is chosen")
        name = self.to.get(str(fields.get(self.by, "")), self.otherwise) if self.by in fields else self.otherwise
        if not name:
            return Unscored(f"no scorer is configured for {self.by}={str(fields[self.by])[:100]!r}; there are {', '.join(sorted(self.to))}")
        return _missing(known, name) or known[name].value


def outcome_of(value: float, known: Known) -> Outcome:
    """The outcome: the number, and as parts the scores it was made of, `name` and `name.part`."""
    parts: dict[str, float] = {}
    for name, scored in known.items():
        parts[name] = scored.value
        parts.update((f"{name}.{part}", number) for part, number in scored.parts.items())
    if len(parts) > MAX_PARTS:
        return Unscored(f"{len(parts)} parts; at most {MAX_PARTS} are carried", "error")
    if not math.isfinite(value):
        return Unscored(f"the scores {({name: scored.value for name, scored in known.items()})} combine to {value}", "non_finite")
    return Scored(value=value, parts=parts)


def _total(terms: Sequence[float]) -> float:
    """Their sum, exactly rounded; infinite or NaN where it overflows (fsum raises then)."""
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        return sum(terms)


def _missing(known: Known, *names: str) -> Needed:
    return tuple(name for name in names if name not in known)
