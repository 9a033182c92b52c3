"""Scorers of the system tests: cheap, with spread inside a group."""

from __future__ import annotations

import zlib
from typing import Any


def even_length(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Share of characters that are lower-case letters, so that groups of random text have spread."""
    return sum(c.islower() for c in completion) / max(1, len(completion))


def sometimes(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """As above, but raises for a quarter of all texts, the same ones each time."""
    if zlib.crc32(completion.encode()) % 4 == 0:
        raise LookupError("no opinion of this one")
    return even_length(prompt, completion, fields)
