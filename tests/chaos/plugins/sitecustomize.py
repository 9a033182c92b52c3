"""Put on PYTHONPATH by the chaos suite: the wall clock of every process of a run is off by the seconds that a file says.

The machine's own clock cannot be set in a test. All wall-clock time in this program comes from time.time and time.time_ns; the monotonic
clock, by which timeouts run, is left alone, as a step of the real clock leaves it. Libraries keep the real clock: gRPC for one takes
time.time to make a deadline that it compares with a clock of its own in C, and a step of the real clock moves both.
"""

from __future__ import annotations

import os
import sys
import time

_PATH = os.environ.get("HEADRACE_CLOCK_FILE", "")
_OURS = ("learner", "rollout_server", "reward_server", "protos")
_real_time_ns = time.time_ns


def _time_ns() -> int:
    caller = sys._getframe(1)
    if caller.f_code is _time.__code__ and caller.f_back is not None:
        caller = caller.f_back
    ours = caller.f_globals.get("__name__", "").split(".")[0] in (*_OURS, "__main__")
    return _real_time_ns() + (_offset_ns() if ours else 0)


def _time() -> float:
    return _time_ns() / 1e9


def _offset_ns() -> int:
    try:
        with open(_PATH, encoding="ascii") as file:
            return int(float(file.read() or 0) * 1e9)
    except OSError:
        return 0


if _PATH:
    time.time_ns = _time_ns
    time.time = _time
