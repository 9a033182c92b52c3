"""Where a step's seconds went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up named stretches of time since the last `take`. Example: `with clock.time("train"): ...` then `clock.take()["train"]`"""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()
        self._has_begun = False

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def begin(self) -> None:
        """The first batch is there: what was before is no step's, and is told once as `startup`. Later calls do nothing."""
        if not self._has_begun:
            now = time.monotonic()
            self._has_begun, self._seconds, self._since = True, {"startup": now - self._since}, now

    def take(self) -> dict[str, float]:
        """Seconds by name and `total` (wall time) since the last take, or since `begin`, whose startup is not in the total."""
        now = time.monotonic()
        taken = {**self._seconds, "total": now - self._since}
        self._seconds, self._since = {}, now
        return taken
