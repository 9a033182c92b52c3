"""Processes as the kernel tells of them in /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def descendants(pid: int) -> Iterator[int]:
    """Processes below one, itself left out."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)
