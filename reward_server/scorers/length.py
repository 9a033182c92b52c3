"""length: completions of a wanted length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Unit = Literal["characters", "words", "lines"]


def score(
    prompt: str, completion: str, fields: Mapping[str, Any], *, most: int, least: int = 0, slack: int = 0, unit: Unit = "characters"
) -> tuple[float, dict[str, float]]:
    """1 inside [least, most], falling in a straight line to 0 at `slack` outside of it."""
    length = _length(completion, unit)
    outside = max(least - length, length - most, 0)
    value = 1.0 if outside == 0 else max(0.0, 1.0 - outside / slack) if slack else 0.0
    return value, {"length": float(length)}


def check(*, most: int, least: int = 0, slack: int = 0, unit: Unit = "characters") -> None:
    """Raises ValueError for bounds that contradict each other or an unknown unit."""
    if unit not in ("characters", "words", "lines"):
        raise ValueError(f'unit={unit!r} is none of "characters", "words", "lines"')
    if not 0 <= least <= most or slack < 0:
        raise ValueError(f"0 <= least <= most and 0 <= slack must hold, got least={least}, most={most}, slack={slack}")


def _length(text: str, unit: Unit) -> int:
    if unit == "characters":
        return len(text)
    return len(text.split()) if unit == "words" else len(text.splitlines())
