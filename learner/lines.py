"""Files of whole lines that several processes append to, and that a full disk or a crash does not spoil."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

_LOG = logging.getLogger("headrace.learner.lines")


class Lines:
    """Appends lines to one file. What the disk does not take now is kept and goes before the next line; nobody is stopped for it.

    Each append holds a lock on the file, and what a short write left is taken back at once: the file holds whole lines whenever the lock is
    free, but for the piece that a crash left, which the next append cuts off.
    Example: `Lines(run_dir / "metrics.jsonl").append('{"step": 1}\\n')`
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._late = b""

    @property
    def num_late_bytes(self) -> int:
        return len(self._late)

    def append(self, text: str) -> None:
        """One or more whole lines, each with its end."""
        was_late, self._late = bool(self._late), self._late + text.encode()
        try:
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                self._mend(file)
                _write(file, self._late)
                self._late = b""
            finally:
                os.close(file)
        except OSError as error:
            if not was_late:
                _LOG.error("%s: %s; its lines are kept and written once it works again", self._path, error.strerror)

    def _mend(self, file: int) -> None:
        """Cuts off the piece of a line that a crash left: a line after it would be lost with it."""
        end = whole = os.fstat(file).st_size
        if end == 0 or os.pread(file, 1, end - 1) == b"\n":
            return
        while whole and os.pread(file, 1, whole - 1) != b"\n":
            whole = _line_start(file, whole)
        _LOG.warning("%s: cut off %d bytes of a line that was never finished", self._path, end - whole)
        os.ftruncate(file, whole)


def _line_start(file: int, end: int) -> int:
    """Byte after the last line end before `end`, looking back 64 KiB; where that part has none, its beginning."""
    start = max(0, end - (64 << 10))
    return start + os.pread(file, end - start, start).rfind(b"\n") + 1


def _write(file: int, data: bytes) -> None:
    """All of it or, with OSError, none of it."""
    before, done = os.fstat(file).st_size, 0
    try:
        while done < len(data):  # a disk that is nearly full takes a part
            done += os.write(file, data[done:])
    except OSError:
        os.ftruncate(file, before)
        raise
