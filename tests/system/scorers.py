"""Scorers of the system tests: cheap, with spread inside a group."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any


def even_length(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Share of characters that are lower-case letters, so that groups of random text have spread."""
    return sum(c.islower() for c in completion) / max(1, len(completion))


def sometimes(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """As above, but raises for a quarter of all texts, the same ones each time."""
    if zlib.crc32(completion.encode()) % 4 == 0:
        raise LookupError("no opinion of this one")
    return even_length(prompt, completion, fields)


async def slow_when_told(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """As the first, after fifteen seconds while the file named in the prompt's record exists: several times what a sample takes to be drawn."""
    if Path(fields["slow_while"]).exists():
        await asyncio.sleep(15)
    return even_length(prompt, completion, fields)


def with_parts(prompt: str, completion: str, fields: dict[str, Any]) -> dict[str, float]:
    """Named parts, and at times no spread in a group, which is dropped for that: of four samples all are even or odd once in eight."""
    even = float(zlib.crc32(completion.encode()) % 2 == 0)
    return {"score": even, "even": even, "length": len(completion) / 100}
