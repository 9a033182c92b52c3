"""Conditions over figures, written once: each is evaluated on a Window, and is PromQL as well.

In Prometheus the figures of several runs lie side by side, so every match and sum is by `run` too; a Window is of one run.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from learner.watch.window import Labels, Vector, Window

_LOOKBACK_S = 0.0


class Expression(ABC):
    """Gives a vector: a value for each set of labels; a comparison leaves out those that it does not hold for."""

    @abstractmethod
    def promql(self) -> str:
        """The same in Prometheus' language, in parentheses where it needs them."""

    @abstractmethod
    def value(self, window: Window) -> Vector:
        """What it is at the newest moment."""

    def horizons_s(self) -> Iterator[tuple[str, float]]:
        """Figures that it reads, and how far back."""
        for part in self._parts():
            yield from part.horizons_s()

    def _parts(self) -> tuple[Expression, ...]:
        return ()


def duration(value: float) -> str:
    """PromQL's words for a time in seconds. Example: 90.5 is "90500ms", 300.0 is "5m"."""
    if value % 60 == 0:
        return f"{value / 60:.0f}m"
    return f"{value:.0f}s" if value % 1 == 0 else f"{1000 * value:.0f}ms"


def _fits(key: Labels, match: dict[str, str]) -> bool:
    return all((name, value) in key for name, value in match.items())


@dataclass(frozen=True, kw_only=True)
class _Figure(Expression):
    name: str
    match: tuple[tuple[str, str], ...] = ()

    def _selector(self) -> str:
        return self.name + ("{" + ",".join(f'{name}="{value}"' for name, value in self.match) + "}" if self.match else "")

    def _only(self, vector: Vector) -> Vector:
        return {key: value for key, value in vector.items() if _fits(key, dict(self.match))}


class Now(_Figure):
    """The newest value."""

    def promql(self) -> str:
        return self._selector()

    def value(self, window: Window) -> Vector:
        return self._only(window.newest(self.name))

    def horizons_s(self) -> Iterator[tuple[str, float]]:
        yield self.name, _LOOKBACK_S


@dataclass(frozen=True, kw_only=True)
class Mean(_Figure):
    """Its mean over some time that ended some time ago."""

    over_s: float
    ago_s: float = 0.0

    def promql(self) -> str:
        return f"avg_over_time({self._selector()}[{duration(self.over_s)}]{f' offset {duration(self.ago_s)}' if self.ago_s else ''})"

    def value(self, window: Window) -> Vector:
        return self._only(window.mean(self.name, self.over_s, self.ago_s))

    def horizons_s(self) -> Iterator[tuple[str, float]]:
        yield self.name, self.over_s + self.ago_s


@dataclass(frozen=True, kw_only=True)
class Rate(_Figure):
    """A counter's increase a second."""

    over_s: float

    def promql(self) -> str:
        return f"rate({self._selector()}[{duration(self.over_s)}])"

    def value(self, window: Window) -> Vector:
        return self._only(window.rate(self.name, self.over_s))

    def horizons_s(self) -> Iterator[tuple[str, float]]:
        yield self.name, self.over_s


_REDUCE: dict[str, Callable[[list[float]], float]] = {"sum": math.fsum, "avg": statistics.fmean, "median": statistics.median, "count": len}


@dataclass(frozen=True, kw_only=True)
class By(Expression):
    """Several values in one, for each value of some labels: their sum, mean, median or number."""

    of: Expression
    how: Literal["sum", "avg", "median", "count"]
    labels: tuple[str, ...] = ()

    def promql(self) -> str:
        by = ", ".join(("run", *self.labels))
        return f"quantile by ({by}) (0.5, {self.of.promql()})" if self.how == "median" else f"{self.how} by ({by}) ({self.of.promql()})"

    def value(self, window: Window) -> Vector:
        together: dict[Labels, list[float]] = {}
        for key, value in self.of.value(window).items():
            together.setdefault(_on(key, self.labels), []).append(value)
        return {key: float(_REDUCE[self.how](values)) for key, values in together.items()}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of,)


@dataclass(frozen=True, kw_only=True)
class Times(Expression):
    """A multiple."""

    factor: float
    of: Expression

    def promql(self) -> str:
        return f"({self.factor:g} * {self.of.promql()})"

    def value(self, window: Window) -> Vector:
        return {key: self.factor * value for key, value in self.of.value(window).items()}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of,)


@dataclass(frozen=True, kw_only=True)
class Over(Expression):
    """A quotient of values that agree in some labels; none where the divisor is 0 (PromQL: NaN, which no comparison holds for)."""

    of: Expression
    by: Expression
    on: tuple[str, ...] = ()

    def promql(self) -> str:
        return f"({self.of.promql()} / {_matching(self.on)} {self.by.promql()})"

    def value(self, window: Window) -> Vector:
        below = {_on(key, self.on): value for key, value in self.by.value(window).items()}
        return {key: value / below[_on(key, self.on)] for key, value in self.of.value(window).items() if below.get(_on(key, self.on))}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of, self.by)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {">": lambda a, b: a > b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "==": lambda a, b: a == b}


@dataclass(frozen=True, kw_only=True)
class Is(Expression):
    """Values for which a comparison holds, with a number or with values that agree in some labels."""

    of: Expression
    op: str
    than: float | Expression
    on: tuple[str, ...] = ()

    def promql(self) -> str:
        other = self.than.promql() if isinstance(self.than, Expression) else f"{self.than:g}"
        matching = f"{_matching(self.on)} " if isinstance(self.than, Expression) else ""
        return f"({self.of.promql()} {self.op} {matching}{other})"

    def value(self, window: Window) -> Vector:
        holds, found = _COMPARISONS[self.op], self.of.value(window)
        if not isinstance(self.than, Expression):
            than = self.than
            return {key: value for key, value in found.items() if holds(value, than)}
        others = {_on(key, self.on): value for key, value in self.than.value(window).items()}
        return {key: value for key, value in found.items() if _on(key, self.on) in others and holds(value, others[_on(key, self.on)])}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of, self.than) if isinstance(self.than, Expression) else (self.of,)


@dataclass(frozen=True, kw_only=True)
class And(Expression):
    """Values of the first for which the second has one that agrees in some labels."""

    of: Expression
    where: Expression
    on: tuple[str, ...] = ()

    def promql(self) -> str:
        return f"({self.of.promql()} and on ({', '.join(('run', *self.on))}) {self.where.promql()})"

    def value(self, window: Window) -> Vector:
        others = {_on(key, self.on) for key in self.where.value(window)}
        return {key: value for key, value in self.of.value(window).items() if _on(key, self.on) in others}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of, self.where)


@dataclass(frozen=True, kw_only=True)
class Or(Expression):
    """Values of both; they differ in their labels."""

    of: Expression
    other: Expression

    def promql(self) -> str:
        return f"({self.of.promql()} or {self.other.promql()})"

    def value(self, window: Window) -> Vector:
        return {**self.other.value(window), **self.of.value(window)}

    def _parts(self) -> tuple[Expression, ...]:
        return (self.of, self.other)


def _on(key: Labels, names: tuple[str, ...]) -> Labels:
    return frozenset((name, value) for name, value in key if name in names)


def _matching(on: tuple[str, ...]) -> str:
    return f"on ({', '.join(('run', *on))}) group_left ()"
