"""Put on PYTHONPATH by the chaos suite: the wall clock of every process of a run is off by the seconds that a file says.

The machine's own clock cannot be set in a test. All wall-clock time in this program comes from time.time and time.time_ns; the monotonic
clock, by which timeouts run, is left alone, as a step of the real clock leaves it.
"""

from __future__ import annotations

import os
import time

_PATH = os.environ.get("HEADRACE_CLOCK_FILE", "")
_real_time_ns = time.time_ns


def _offset_ns() -> int:
    try:
        with open(_PATH, encoding="ascii") as file:
            return int(float(file.read() or 0) * 1e9)
    except OSError:
        return 0


if _PATH:
    time.time_ns = lambda: _real_time_ns() + _offset_ns()
    time.time = lambda: time.time_ns() / 1e9
