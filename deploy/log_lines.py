"""What all services of a run write, in one stream: each line with its service's name before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from deploy.progress import whole_lines

PAUSE_S = 0.3


async def prefixed(folders: Iterable[Path]) -> AsyncIterator[str]:
    """`[rollout-1] ...` for each line that is written to a log of the folders from now on, those that come later included; for ever."""
    folders = tuple(dict.fromkeys(folders))
    offsets = {file: file.stat().st_size for folder in folders for file in folder.glob("*.log")}
    while True:
        for folder in folders:
            for file in sorted(folder.glob("*.log")):
                for line, end in whole_lines(file, offsets.get(file, 0)):
                    offsets[file] = end
                    yield f"[{file.stem}] {line.decode(errors='replace').rstrip()}"
        await asyncio.sleep(PAUSE_S)
