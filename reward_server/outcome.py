"""What a scorer said: a finite number with named parts, or the typed absence of one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, get_args

Reason = Literal["timeout", "error", "non_finite", "unavailable", "refused", "bad_reference", "overloaded", "breaker_open"]

MAX_DETAIL_CHARS = 2000
MAX_PARTS = 64
MAX_NAME_CHARS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A finite number and what it was made of.

    Example: `Scored(value=0.7, parts={"correct": 1.0, "length": -0.3})`
    """

    value: float  # finite
    parts: Mapping[str, float] = field(default_factory=dict)  # finite; empty: the scorer names none


@dataclass(frozen=True, slots=True)
class Unscored:
    """Why there is no score. A scorer returns it, too: `return Unscored("the record has no gold answer")`."""

    detail: str  # for people
    reason: Reason = "refused"


Outcome = Scored | Unscored
Answered = Outcome | tuple[Outcome, ...]  # a tuple: of a whole group, one for each sample


def checked(result: object) -> Outcome:
    """What a scorer returned, as an Outcome: a number, `(number, parts)`, a dict with "score", or Unscored.

    Anything that is not a finite number is Unscored("...", "non_finite"); never raises for what it is given, except
    what the result's own methods raise.
    """
    if type(result) is float and math.isfinite(result):
        return Scored(value=result)
    if isinstance(result, Unscored):
        return _unscored(result)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return _with_parts(result[0], result[1])
    if isinstance(result, Mapping):
        if "score" not in result:
            return Unscored(f'a dict without the key "score", but {clean(", ".join(map(str, list(result)[:10])))}', "non_finite")
        return _with_parts(result["score"], {name: part for name, part in result.items() if name != "score"})
    return _with_parts(result, {})


def checked_group(result: object, size: int) -> Answered:
    """What a scorer of whole groups returned: a sequence with one result for each sample, each as in `checked`; or one Unscored for all."""
    if isinstance(result, Unscored):
        return _unscored(result)
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        return Unscored(f"a scorer of groups returned {type(result).__name__}, not a list of {size} results", "non_finite")
    results = list(islice(result, size + 1))
    if len(results) != size:
        return Unscored(f"a scorer of groups returned {'more' if len(results) > size else 'fewer'} results than the {size} samples it was given", "error")
    return tuple(map(checked, results))


def of_each(answered: Answered, size: int) -> tuple[Outcome, ...]:
    """One outcome for each sample of a group; a single one is that of all."""
    if not isinstance(answered, tuple):
        return (answered,) * size
    return answered if len(answered) == size else (Unscored(f"{len(answered)} answers to {size} samples", "error"),) * size


def clean(text: str) -> str:
    """Text that fits an answer: no unpaired surrogates, bounded length."""
    return text[:MAX_DETAIL_CHARS].encode("utf-8", "replace").decode()


def _unscored(result: Unscored) -> Unscored:
    if result.reason not in get_args(Reason):
        return Unscored(f"Unscored with reason {clean(str(result.reason))!r}, which is none of {get_args(Reason)}", "error")
    return Unscored(clean(str(result.detail)), result.reason)


def _with_parts(value: object, parts: Mapping[object, object]) -> Outcome:
    if len(parts) > MAX_PARTS:
        return Unscored(f"{len(parts)} parts; at most {MAX_PARTS} are carried", "error")
    number = _number(value)
    if isinstance(number, str):
        return Unscored(f"the score is {number}, not a finite number", "non_finite")
    named: dict[str, float] = {}
    for name, part in parts.items():
        part_number = _number(part)
        if isinstance(part_number, str):
            return Unscored(f"part {clean(str(name))[:MAX_NAME_CHARS]!r} is {part_number}, not a finite number", "non_finite")
        named[clean(str(name))[:MAX_NAME_CHARS]] = part_number
    return Scored(value=number, parts=named)


def _number(value: object) -> float | str:
    """The finite float, or the words for what it is instead. bool, int and scalars of numpy and torch are numbers."""
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        return f"of type {type(value).__name__}"
    try:
        number = float(value)  # type: ignore[arg-type]  # checked in the line above
    except OverflowError:
        return "larger than any float"
    return number if math.isfinite(number) else str(number)
