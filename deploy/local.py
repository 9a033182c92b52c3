"""Keeps the services of one machine running until the run ends.

    Local.start ─▶ one task a service:  spawn ─▶ wait for its exit ─▶ restart after a backoff, or end the run
                       └ beside it:     health check until SERVING ─▶ ready(name)

consumes: exits of the processes, health answers.  produces: logs, events, `Outcome`.
waits for: `outcome`, which the learner's exit, a service beyond its restarts, or `stop` sets.
Every process has its own session: a Ctrl-C reaches the launcher alone, and a stop can kill what a service left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from deploy.health import until_serving
from deploy.services import Service

log = logging.getLogger("headrace.deploy.local")
CHILD = Path(__file__).with_name("child.py")
USER_MISTAKE = 2
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How patient the launcher is.

    Example: `Policy(max_restarts=3)` gives up at the fourth early death in a row of one service.
    """

    max_restarts: int = 5  # in a row; a life of settled_s starts the count anew
    first_backoff_s: float = 1.0  # doubled at each restart in a row
    longest_backoff_s: float = 30.0
    settled_s: float = 300.0
    grace_s: float = 20.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How the run ended.

    Example: `Outcome(code=2, message="learner: headrace: model 'x' is not a folder ...")`
    """

    code: int  # 0: the learner finished; 2: a user's mistake; 128 + n: stopped by signal n; 1: anything else
    message: str  # empty for 0

    def check(self) -> None:
        """Raises ValueError for a user's mistake, RunEnded for any other end but a good one."""
        if self.code == USER_MISTAKE:
            raise ValueError(self.message)
        if self.code:
            raise RunEnded(self)


class RunEnded(RuntimeError):
    """The run ended before it was finished, or before something that was waited for."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message or "the run finished while something else was waited for")
        self.exit_code = outcome.code or 1


class Local:
    """The launcher; use it as an async context, whose end stops everything.

    Example:
        async with Local() as local:
            local.start(service)
            await local.ready("reward-0", limit_s=60)
            outcome = await local.outcome()
    """

    def __init__(self, policy: Policy | None = None, on_event: Callable[[str], None] = log.info) -> None:
        self._policy = policy or Policy()
        self._on_event = on_event
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._ended: asyncio.Future[Outcome] | None = None
        self.restarts: dict[str, int] = {}  # of each service since start, all of them

    async def __aenter__(self) -> Local:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, number)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop(*reversed(self._tasks))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)

    def start(self, service: Service) -> None:
        """Starts a service and keeps it running."""
        assert service.name not in self._tasks, service.name
        self._ready[service.name] = asyncio.Event()
        self.restarts[service.name] = 0
        self._tasks[service.name] = asyncio.create_task(self._keep(service), name=service.name)

    async def ready(self, name: str, *, limit_s: float) -> None:
        """Returns once the service has answered SERVING. Raises as `until`, and says why for TimeoutError."""
        try:
            await self.until(self._ready[name].wait(), limit_s=limit_s)
        except TimeoutError:
            raise TimeoutError(f"{name} did not answer health checks within {limit_s:.0f} s; its log says why") from None

    async def until(self, wait: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
        """Awaits something for as long as the run goes on. Raises RunEnded or ValueError when it ends, TimeoutError after limit_s."""
        assert self._ended is not None
        task = asyncio.create_task(wait)
        try:
            both: set[asyncio.Future[Any]] = {task, self._ended}
            await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._ended.done():
                self._ended.result().check()
                raise RunEnded(self._ended.result())
            raise TimeoutError
        finally:
            task.cancel()

    async def outcome(self) -> Outcome:
        """How the run ended; waits for it."""
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def stop(self, *names: str) -> None:
        """SIGTERM to the named services at once, SIGKILL after the grace, then whatever is left of their sessions."""
        stopped = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)

    def _interrupt(self, number: int) -> None:
        assert self._ended is not None
        if self._ended.done():
            for process in self._processes.values():
                _kill_session(process.pid)
            return
        self._on_event(f"{signal.Signals(number).name}: stopping; once more kills at once")
        self._end(Outcome(code=128 + number, message=f"stopped by {signal.Signals(number).name}"))

    def _end(self, outcome: Outcome) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(outcome)

    async def _keep(self, service: Service) -> None:
        in_a_row = 0
        while True:
            started = time.monotonic()
            code = await self._live(service)
            if time.monotonic() - started >= self._policy.settled_s:
                in_a_row = 0
            if outcome := self._final(service, code, in_a_row):
                self._end(outcome)
                return
            if code == 0:
                self._on_event(f"{service.name} left with 0")
                return
            backoff_s = min(self._policy.first_backoff_s * 2**in_a_row, self._policy.longest_backoff_s)
            in_a_row += 1
            self.restarts[service.name] += 1
            self._on_event(f"{service.name} died ({_words(code)}); restart {in_a_row} of {self._policy.max_restarts} in {backoff_s:.1f} s, see {service.log}")
            await asyncio.sleep(backoff_s)

    def _final(self, service: Service, code: int, in_a_row: int) -> Outcome | None:
        """What the exit of a service means for the run; None: it goes on."""
        if code == USER_MISTAKE:
            return Outcome(code=USER_MISTAKE, message=f"{service.name}: {_last_mistake(service.log)}")
        if not service.restart:
            return Outcome(code=0, message="") if code == 0 else Outcome(code=1, message=f"{service.name} died ({_words(code)}), see {service.log}")
        if code != 0 and in_a_row >= self._policy.max_restarts:
            return Outcome(code=1, message=f"{service.name} died ({_words(code)}) after {in_a_row} restarts in a row, see {service.log}")
        return None

    async def _live(self, service: Service) -> int:
        """One life of a service; its exit code, 127 where it cannot be started. Cancelled: stops it in good order first."""
        self._ready[service.name].clear()
        try:
            process = await _spawn(service)
        except OSError as error:
            self._on_event(f"{service.name} cannot be started: {error}")
            return 127
        self._processes[service.name] = process
        checks = asyncio.create_task(self._check(service)) if service.address else None
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _terminate(process, max(self._policy.grace_s, service.grace_s))
            raise
        finally:
            _kill_session(process.pid)
            self._processes.pop(service.name, None)
            if checks:
                checks.cancel()

    async def _check(self, service: Service) -> None:
        started = time.monotonic()
        await until_serving(service.address, security=service.security)
        self._ready[service.name].set()
        self._on_event(f"{service.name} serves on {service.address} after {time.monotonic() - started:.1f} s")


async def _spawn(service: Service) -> asyncio.subprocess.Process:
    service.log.parent.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-I", "-S", str(CHILD), str(os.getpid()), *service.command)
    with service.log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **service.environment},
            start_new_session=True,
        )


async def _terminate(process: asyncio.subprocess.Process, grace_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace_s)
    except TimeoutError:
        log.warning("process %d ignored SIGTERM for %.0f s: killed", process.pid, grace_s)
        _kill_session(process.pid)
        await process.wait()


def _kill_session(pid: int) -> None:
    """Whatever is left of a process group whose leader was `pid`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _words(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_mistake(file: Path) -> str:
    """The last line that speaks to the user in a log."""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith("headrace: ")]
    return lines[-1].removeprefix("headrace: ") if lines else f"refused its configuration, see {file}"
