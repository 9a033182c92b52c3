"""Looks at every process of a service again and again: memory, descriptors, threads."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import psutil

from tests.system.soak.flatness import Reading


class Watch:
    """`run` until cancelled; then `readings` by process. A process that ends meanwhile, or a new one, is told in `changes`."""

    def __init__(self, pid: int, *, every_s: float) -> None:
        self._pid = pid
        self._every_s = every_s
        self._names: dict[int, str] = {}
        self._start_s = time.monotonic()
        self.readings: dict[str, list[Reading]] = {}
        self.changes: list[str] = []

    async def run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._every_s)

    def _look(self) -> None:
        found = {process.pid: process for process in self._processes()}
        for pid, process in found.items():
            if pid not in self._names:
                name = self._names[pid] = self._name(process)
                if self.readings and name not in self.readings and name != "clients":
                    self.changes.append(f"{name} (process {pid}) was not there at the start")
        self.changes += [f"{self._names.pop(pid)} (process {pid}) is gone" for pid in list(self._names) if pid not in found]
        for pid, process in found.items():
            try:
                self.readings.setdefault(self._names[pid], []).append(self._read(process))
            except psutil.NoSuchProcess:
                continue  # the next look says so

    def _processes(self) -> Iterator[psutil.Process]:
        """The service with all below it, and this process, which holds the clients."""
        yield psutil.Process(os.getpid())
        try:
            service = psutil.Process(self._pid)
            yield from (service, *service.children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def _name(self, process: psutil.Process) -> str:
        if process.pid == os.getpid():
            return "clients"
        if process.pid == self._pid:
            return "server"
        line = " ".join(process.cmdline())
        if "resource_tracker" in line:
            return "resource_tracker"
        plain = process.name() if "python" not in process.name() else "child"
        taken = sum(name.startswith(plain) for name in self.readings)
        return f"{plain}-{taken}" if taken else plain

    def _read(self, process: psutil.Process) -> Reading:
        with process.oneshot():
            return Reading(
                at_s=time.monotonic() - self._start_s, rss_mib=process.memory_info().rss / (1 << 20), num_files=process.num_fds(), num_threads=process.num_threads()
            )  # fmt: skip
