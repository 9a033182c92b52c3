"""One child process of the learner with its log, and how patiently it is started again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MAX_FAILURES = 5
HEALTHY_S = 60.0  # a child that lived this long has not failed in a row
LAST_LINES_BYTES = 1 << 16  # of metrics.jsonl: some ten lines
_TERM = signal.SIGTERM


class Child:
    """One process with a log file. Example: `child = Child("gateway", [...], log)`, `await child.start()`, `await child.wait()`."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self._arguments, self._log = name, arguments, log
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self.started = 0.0

    async def start(self) -> None:
        with self._log.open("ab") as output:
            self._log_start = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self._arguments, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.started = time.monotonic()

    async def wait(self) -> int:
        """Its exit code; negative: the signal that killed it."""
        assert self._process is not None
        return await self._process.wait()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def end(self, grace_s: float, number: int = _TERM) -> int:
        """The signal, and SIGKILL after the grace; its exit code."""
        self.signal(number)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    def complaint(self) -> str:
        """Its lines `headrace: ...` since the last start, without the prefix; else its last line."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line.removeprefix("headrace: ") for line in lines if line.startswith("headrace: ")]
        return "\n".join(said or lines[-1:])


def furthest_step(run_dir: Path) -> int:
    """Highest step among the last lines of metrics.jsonl; 0 without one."""
    path, steps = run_dir / "metrics.jsonl", [0]
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_LINES_BYTES))
            for line in file.read().splitlines():
                with suppress(ValueError, KeyError, TypeError):  # the first one may be cut, the last one unfinished
                    steps.append(int(json.loads(line)["step"]))
    return max(steps)


class Patience:
    """Counts failures in a row and waits longer after each. A failure is in a row unless the child lived long, or the run came further
    than it ever had: a run that is killed again and again is no program that cannot run."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._furthest = furthest_step(run_dir)
        self.num_failures = 0

    async def after(self, lived_s: float) -> bool:
        """Waits before the next start; False: no more."""
        before, self._furthest = self._furthest, max(self._furthest, furthest_step(self._run_dir))
        self.num_failures = 1 if lived_s >= HEALTHY_S or self._furthest > before else self.num_failures + 1
        if self.num_failures > MAX_FAILURES:
            return False
        await asyncio.sleep(min(5.0, 0.1 * 3 ** (self.num_failures - 1)))
        return True
