"""length: completions of a wanted length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

Unit = Literal["characters", "words", "lines"]
Count = Annotated[int, Field(ge=0)]


def score(
    prompt: str, completion: str, fields: Mapping[str, Any], *, most: Count, least: Count = 0, slack: Count = 0, unit: Unit = "characters"
) -> tuple[float, dict[str, float]]:
    """1 inside [least, most], falling in a straight line to 0 at `slack` outside of it.

    Example: least 2, most 4, slack 2: length 5 gives 1/2, 6 gives 0. Part: length.
    Source: the soft edge is DAPO's (Yu et al. 2025, section 3.4). Limits: text, not tokens.
    """
    length = length_of(completion, unit)
    outside = max(least - length, length - most, 0)
    value = 1.0 if outside == 0 else max(0.0, 1.0 - outside / slack) if slack else 0.0
    return value, {"length": float(length)}


def check(*, most: int, least: int = 0, slack: int = 0, unit: Unit = "characters") -> None:
    """Raises ValueError for bounds that contradict each other."""
    if least > most:
        raise ValueError(f"least <= most must hold, got least={least}, most={most}")


def length_of(text: str, unit: Unit) -> int:
    """In the unit."""
    if unit == "characters":
        return len(text)
    return len(text.split()) if unit == "words" else len(text.splitlines())
