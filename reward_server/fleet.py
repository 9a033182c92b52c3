"""How many scorer processes there are: started ahead, replaced when they die, ended when there are too many.

`keep_up` starts what is missing (woken by every death and every change of what is wanted); each start is a task that
waits for the process to have loaded its scorers and then hands it to `on_ready`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from reward_server.accounts import Told
from reward_server.process import ScorerProcess

log = logging.getLogger("headrace.reward_server.fleet")

LONGEST_REST_S = 5.0
SURPLUS_S = 30.0


class Fleet:
    """Owns every process until it is reaped.

    Example: a pool of 2 workers and 1 spare gives `wanted=lambda: 3 + num_slow`.
    """

    def __init__(
        self,
        *,
        hello: bytes,
        folder: Path,
        load_limit_s: float,
        wanted: Callable[[], int],
        make: Callable[[], ScorerProcess],
        on_ready: Callable[[ScorerProcess, list[Told]], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._hello = hello
        self._folder = folder
        self._load_limit_s = load_limit_s
        self._wanted = wanted
        self._make = make
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._num_starting = 0
        self._rest_s = 0.0  # wait before the next start, after starts that failed
        self._surplus_at_s: float | None = None  # since when there have been too many
        self._processes: set[ScorerProcess] = set()  # not reaped; starting and dying ones, too
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    @property
    def num_ready(self) -> int:
        """Processes that work or could."""
        return sum(process.is_ready and not process.is_dead for process in self._processes)

    async def start_first(self) -> None:
        """Returns once one process is ready; the others follow. Raises ValueError in one line when the scorers cannot be loaded."""
        try:
            await self._start()
        except ChildProcessError as error:
            raise ValueError(f"scorers could not be loaded: {error}; what it printed stands in the log above") from None
        self.keep_up()

    def keep_up(self) -> None:
        """Starts what is missing."""
        missing = self._wanted() - self.num_ready - self._num_starting
        for _ in range(0 if self._is_stopped else missing):
            self._num_starting += 1
            self.spawn(self._start_another())

    def retire(self, process: ScorerProcess) -> None:
        """Kills a process and starts another if one is missing then."""
        process.is_dead = True
        process.kill()
        self.spawn(self._bury(process))
        self.keep_up()

    async def end(self, process: ScorerProcess, wait_s: float) -> str:
        """Reaps a process that goes down by itself. Returns words for how it ended."""
        words = await process.end(wait_s)
        self._processes.discard(process)
        return words

    def surplus(self, now_s: float) -> bool:
        """Whether one process should be retired: there have been too many for SURPLUS_S."""
        if self.num_ready <= self._wanted():
            self._surplus_at_s = None
        elif self._surplus_at_s is None:
            self._surplus_at_s = now_s
        elif now_s - self._surplus_at_s > SURPLUS_S:
            self._surplus_at_s = now_s
            return True
        return False

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a task that ends with the fleet."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Kills and reaps every process."""
        self._is_stopped = True
        for task in self._tasks:
            task.cancel()
        for process in self._processes:
            process.is_dead = True
            process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.end() for process in self._processes))
        self._processes.clear()

    async def _start_another(self) -> None:
        try:
            await asyncio.sleep(self._rest_s)
            await self._start()
            self._rest_s = 0.0
        except (ValueError, OSError) as error:  # ChildProcessError is an OSError
            log.error("a scorer process could not be started: %s", error)
            self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s + 0.25)
            self._on_failure(str(error))
        finally:
            self._num_starting -= 1
            self.keep_up()

    async def _start(self) -> None:
        process = self._make()
        self._processes.add(process)
        began_s = time.monotonic()
        try:
            told = await process.start(self._hello, self._folder, self._load_limit_s)
        except BaseException:
            process.is_dead = True
            if not self._is_stopped:
                self.spawn(self._bury(process))
            raise
        process.is_ready = True
        log.info("scorer process %d is ready after %.1f s", process.pid, time.monotonic() - began_s)
        self._on_ready(process, told)

    async def _bury(self, process: ScorerProcess) -> None:
        await self.end(process, 0.0)
