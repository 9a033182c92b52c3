"""Files of whole lines that a full disk or a crash does not spoil."""

from __future__ import annotations

import logging
from pathlib import Path

_LOG = logging.getLogger("headrace.learner.lines")


class Lines:
    """Appends lines to one file. What the disk does not take now is kept and goes before the next line; training is never stopped for it.

    Example: `Lines(run_dir / "metrics.jsonl").append('{"step": 1}\\n')`
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._late = b""
        self._mended = False  # an earlier life may have ended inside a line

    @property
    def num_late_bytes(self) -> int:
        return len(self._late)

    def append(self, text: str) -> None:
        """One or more whole lines, each with its end."""
        was_late, self._late = bool(self._late), self._late + text.encode()
        try:
            self._mend()
            with self._path.open("ab", buffering=0) as file:
                while self._late:  # a disk that is nearly full takes a part
                    self._late = self._late[file.write(self._late) :]
        except OSError as error:
            if not was_late:
                _LOG.error("%s: %s; its lines are kept and written once it works again", self._path, error.strerror)

    def _mend(self) -> None:
        """Cuts off the piece of a line that a crash left: a line after it would be lost with it."""
        if self._mended:
            return
        self._path.touch()
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            _LOG.warning("%s: cut off %d bytes of a line that was never finished", self._path, len(data) - whole)
            with self._path.open("r+b") as file:
                file.truncate(whole)
        self._mended = True
