"""overlong: no cost up to a length, then a growing one, for answers that run into the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from reward_server.scorers.length import Unit, length_of

Count = Annotated[int, Field(ge=1)]


def score(
    prompt: str, completion: str, fields: Mapping[str, Any], *, most: Count, buffer: Count, penalty: Annotated[float, Field(gt=0)] = 1.0, unit: Unit = "characters"
) -> tuple[float, dict[str, float]]:
    """0 up to most - buffer, from there falling in a straight line to -penalty at `most`, and -penalty beyond.

    Example: most 100, buffer 20: length 80 gives 0, 90 gives -0.5, 100 and more -1.
    Source: soft overlong punishment, DAPO (Yu et al. 2025, section 3.4, equation 13). Limits: counts characters, words or lines, since scorers
    see text; the learner's `algorithm` section has the same in tokens. To be added to another score.
    """
    length = length_of(completion, unit)
    over = min(max(length - (most - buffer), 0), buffer)
    return -penalty * over / buffer if over else 0.0, {"length": float(length)}


def check(*, most: int, buffer: int, penalty: float = 1.0, unit: Unit = "characters") -> None:
    """Raises ValueError for a buffer larger than the length."""
    if buffer > most:
        raise ValueError(f"buffer={buffer} must be at most most={most}: the cost begins at most - buffer")
