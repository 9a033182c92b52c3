"""last_number: the last number written in the completion is the gold answer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

from pydantic import Field

from reward_server.outcome import Unscored
from reward_server.scorers.gold import gold_texts

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+"
_NUMBER = re.compile(rf"(?:{_DIGITS})(?:[eE][+-]?[0-9]{{1,3}}(?![0-9]))?")
_MINUS = "-\N{MINUS SIGN}\N{EN DASH}"
_BEFORE_DETACHED_SIGN = "=<>(,:*/+^\N{ALMOST EQUAL TO}\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}"


def score(
    prompt: str, completion: str, fields: Mapping[str, Any], *, field: str = "answer", tolerance: Annotated[float, Field(ge=0)] = 0.0
) -> float | Unscored:
    """1 when the completion's last number is the record's answer (within `tolerance`), else 0.

    Example: answer 11, completion `6 + 5 = 11.`: 1. Source: Cobbe et al. 2021 (GSM8K) compare final numbers; the rule for signs is ours.
    Limits: decimal points, not commas; `1/3` ends in 3; no numbers in words.
    """
    gold = gold_texts(fields, field)
    if isinstance(gold, Unscored):
        return gold
    wanted = [as_number(text) for text in gold]
    if None in wanted:
        return Unscored(f"field {field!r} must hold a number for this scorer, it is {fields[field]!r:.200}", "bad_reference")
    given = last_number(completion)
    return float(given is not None and any(_equal(given, each, tolerance) for each in wanted if each is not None))


def last_number(text: str) -> Decimal | None:
    """The last number written in a text; None where there is none.

    A minus is a sign unless it stands between two values or words: "17 - 5" ends in 5, "1 - 8 = -7" in -7, "x-3" in 3.
    Commas group thousands only in threes: "1,234" is one number, "1, 2" two. Fractions are two numbers.
    """
    match = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if match is None:
        return None
    number = _decimal(match.group())
    return -number if number is not None and _is_negative(text[: match.start()]) else number


def as_number(text: str) -> Decimal | None:
    """The number that a whole text is, apart from space, "$" and a final "."; None for anything else."""
    text = text.strip().replace("$", "").removesuffix(".")
    sign, digits = (-1, text[1:]) if text[:1] and text[0] in _MINUS else (1, text.removeprefix("+"))
    number = _decimal(digits) if _NUMBER.fullmatch(digits) else None
    return None if number is None else sign * number


def _decimal(digits: str) -> Decimal | None:
    try:
        return Decimal(digits.replace(",", ""))
    except InvalidOperation:
        return None


def _is_negative(before: str) -> bool:
    """Whether what stands before a number ends in a minus that is a sign."""
    before = before[-200:].removesuffix("$")
    attached = before.rstrip(" ")
    if not attached or attached[-1] not in _MINUS:
        return False
    rest = attached[:-1]
    previous = rest.rstrip(" ")[-1:]
    if len(attached) < len(before):  # "- 7": a sign only after an operator, else a difference or a list's bullet
        return previous != "" and previous in _BEFORE_DETACHED_SIGN
    between_words = rest[-1:].isalpha()  # "x-3"
    return not (between_words or previous.isdigit() or previous in (")", "]", "}"))  # "9-3", "9 -3", "(9) -3"


def _equal(given: Decimal, wanted: Decimal, tolerance: float) -> bool:
    return given == wanted or (tolerance > 0 and abs(given - wanted) <= Decimal(tolerance))
