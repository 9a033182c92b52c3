"""Steps as they are appended to metrics.jsonl, and a line of words for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]


async def follow(file: Path, *, pause_s: float = 0.5, from_start: bool = False) -> AsyncIterator[Metrics]:
    """Objects of whole lines added from now on (or from the start); for ever. The file need not exist yet."""
    offset = 0 if from_start or not file.exists() else file.stat().st_size
    while True:
        for line, end in whole_lines(file, offset):
            offset = end
            yield json.loads(line)
        await asyncio.sleep(pause_s)


def whole_lines(file: Path, offset: int) -> list[tuple[bytes, int]]:
    """Complete lines from a byte offset on, each with the offset after it."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        opened.seek(offset)
        lines = opened.read().splitlines(keepends=True)
    result = []
    for line in lines:
        if not line.endswith(b"\n"):
            break
        offset += len(line)
        result.append((line, offset))
    return result


def read_all(file: Path) -> list[Metrics]:
    """Every whole line of a file; none where there is no file."""
    return [json.loads(line) for line, _ in whole_lines(file, 0)]
