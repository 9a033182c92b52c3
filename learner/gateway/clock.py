"""The times of a run: how long it has been going on over all its gateways, and the time that leases are lent by."""

from __future__ import annotations

import logging
import time
from pathlib import Path

logger = logging.getLogger("headrace.learner.clock")


class LeaseClock:
    """Seconds of the wall clock that do not jump when it is set: it is read once, then the monotonic clock goes on from it.

    latest_lapse: of the leases that an earlier gateway lent. Its clock may have been ahead of ours, and a lease must not live longer than
    lapse_s for that. Example: `LeaseClock(latest_lapse=None, lapse_s=600).now_s()`
    """

    def __init__(self, *, latest_lapse: float | None, lapse_s: float) -> None:
        start_s = time.time()
        if latest_lapse is not None and latest_lapse - lapse_s > start_s:
            logger.warning("the clock was set back by %.0f s or more: leases are lent by the old one", latest_lapse - lapse_s - start_s)
            start_s = latest_lapse - lapse_s
        self._origin_s = start_s - time.monotonic()

    def now_s(self) -> float:
        return self._origin_s + time.monotonic()


class RunClock:
    """Seconds in which a gateway of this run was up. The file is advisory: a crash loses what passed since the last save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._before_s = _number(path)

    @property
    def active_s(self) -> float:
        return self._before_s + time.monotonic() - self._started_s

    def save(self) -> None:
        """A disk that refuses costs the file and a warning, never a step."""
        part = self._path.with_name(self._path.name + ".part")
        try:
            part.write_text(f"{self.active_s:.3f}")
            part.replace(self._path)
        except OSError as error:
            logger.warning("%s: %s", self._path, error)


def _number(path: Path) -> float:
    """0 where there is none, or where a crash left half of one."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0
