"""How long a run has been going on, over all its gateways: what `max_minutes` is measured by."""

from __future__ import annotations

import time
from pathlib import Path


class RunClock:
    """Seconds in which a gateway of this run was up. The file is advisory: a crash loses what passed since the last save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started_s = time.monotonic()
        self._before_s = float(path.read_text()) if path.is_file() else 0.0

    @property
    def active_s(self) -> float:
        return self._before_s + time.monotonic() - self._started_s

    def save(self) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(f"{self.active_s:.3f}")
        part.replace(self._path)
