"""The worker extension with a profiler for the process that schedules: with one worker that process is the worker's own."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
from typing import Any

from rollout_server.worker import WorkerExtension

ORDER = ("tottime", "cumulative")


class ProfiledExtension(WorkerExtension):
    """`headrace_profile_begin` and `_end` are called by collective_rpc, on the thread that steps the engine."""

    _headrace_profile: cProfile.Profile

    def headrace_pid(self) -> int:
        return os.getpid()

    def headrace_profile_begin(self) -> None:
        self._headrace_profile = cProfile.Profile()
        self._headrace_profile.enable()

    def headrace_profile_end(self, num_lines: int) -> dict[str, list[list[Any]]]:
        """The heaviest functions by each order: [function, calls, own seconds, seconds with what it called]."""
        self._headrace_profile.disable()
        stats = pstats.Stats(self._headrace_profile, stream=io.StringIO())
        table: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
        rows: list[list[Any]] = [[f"{path.rpartition('site-packages/')[2]}:{line}:{name}", calls, round(own, 4), round(total, 4)] for (path, line, name), (_, calls, own, total, _) in table.items()]
        return {order: sorted(rows, key=lambda row: row[column], reverse=True)[:num_lines] for order, column in zip(ORDER, (2, 3), strict=True)}
