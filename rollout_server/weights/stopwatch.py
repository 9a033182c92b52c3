"""How long each piece of a pause took."""

from __future__ import annotations

import time


class Stopwatch:
    """Example: `watch = Stopwatch(); ...; watch.lap("pause")`, then `watch.pieces_s == {"pause": 0.01}`."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.pieces_s: dict[str, float] = {}  # in the order in which they ended

    def lap(self, name: str) -> None:
        """Ends a piece."""
        now = time.monotonic()
        self.pieces_s[name] = now - self._last
        self._last = now

    @property
    def last(self) -> str:
        """The piece that ended last; "nothing" before the first."""
        return next(reversed(self.pieces_s), "nothing")

    @property
    def total_s(self) -> float:
        """From the start to the end of the last piece."""
        return self._last - self._began
