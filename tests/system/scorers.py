"""Scorers of the system tests: cheap, with spread inside a group."""

from __future__ import annotations

from typing import Any


def even_length(prompt: str, completion: str, fields: dict[str, Any]) -> float:
    """Share of characters that are lower-case letters, so that groups of random text have spread."""
    return sum(c.islower() for c in completion) / max(1, len(completion))


