"""What all services of a run write, in one stream: each line with its service's name before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from protos.appended import whole_lines

PAUSE_S = 0.3


def prefixed(folders: Iterable[Path], *, ended: asyncio.Event | None = None) -> AsyncIterator[str]:
    """`[rollout-1] ...` for each line that is written to a log of the folders from this call on, those that come later included.

    Until ended is set, then to the last byte, a line without an end included; None: for ever.
    """
    folders = tuple(dict.fromkeys(folders))
    return _prefixed(folders, {file: file.stat().st_size for folder in folders for file in folder.glob("*.log")}, ended)


async def _prefixed(folders: tuple[Path, ...], offsets: dict[Path, int], ended: asyncio.Event | None) -> AsyncIterator[str]:
    while True:
        is_last = ended is not None and ended.is_set()
        for file in [file for folder in folders for file in sorted(folder.glob("*.log"))]:
            for line, end in whole_lines(file, offsets.get(file, 0)):
                offsets[file] = end
                yield _words(file, line)
            if is_last and (rest := file.read_bytes()[offsets.get(file, 0) :]):
                yield _words(file, rest)
        if is_last:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for((ended or asyncio.Event()).wait(), PAUSE_S)


def _words(file: Path, line: bytes) -> str:
    return f"[{file.stem}] {line.decode(errors='replace').rstrip()}"
