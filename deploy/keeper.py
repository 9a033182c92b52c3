"""Keeps the services of a run going until it ends; where a service lives is the launcher's own.

    start ─▶ one task a service:  live (a process here, or an actor of Ray) ─▶ its end ─▶ again after a backoff, or end the run
                 └ beside it:     health check until SERVING ─▶ ready(name)

consumes: ends of services, health answers.  produces: events, `Outcome`.
waits for: `outcome`, which the learner's exit, a service beyond its restarts, or `stop` sets.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from deploy.health import until_serving
from protos.security import Security

log = logging.getLogger("headrace.deploy.keeper")
USER_MISTAKE = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that stop a run in good order
AGAIN_S = 1.0  # a signal that comes sooner after another is no second word
T = TypeVar("T")


class Kept(Protocol):
    """What is kept going."""

    @property
    def name(self) -> str: ...

    @property
    def log(self) -> Path: ...

    @property
    def restart(self) -> bool:
        """False: its exit ends the run."""

    @property
    def leaves(self) -> bool:
        """Whether it may end by itself with 0, and is not started again then."""


K = TypeVar("K", bound=Kept)


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
class Life:
    """How one life of a service ended.

    Example: `Life(code=-9, words="killed by SIGKILL")`
    """

    code: int  # of its exit; below 0: the signal that killed it
    words: str
    again: bool = False  # it is started again whatever it was, the learner too: its machine is gone, or its neighbours moved
    is_fault: bool = True  # False: not counted, and no backoff


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


class Keeper(ABC, Generic[K]):
    """What all launchers share; use one as an async context, whose end stops everything.

    Example:
        async with Local() as keeper:
            keeper.start(service)
            await keeper.ready("reward-0", limit_s=60)
            outcome = await keeper.outcome()
    """

    def __init__(self, policy: Policy | None = None, on_event: Callable[[str], None] = log.info) -> None:
        self._policy = policy or Policy()
        self._on_event = on_event
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._ended: asyncio.Future[Outcome] | None = None
        self._caught: list[signal.Signals] = []
        self._told_s: float | None = None  # when it was last told to stop
        self.restarts: dict[str, int] = {}  # of each service since start, all of them
        self.left: set[str] = set()  # services that ended by themselves with 0

    @abstractmethod
    async def _live(self, service: K) -> Life:
        """One life of a service, to its end. Cancelled: stops it in good order first."""

    @abstractmethod
    def _kill_all(self) -> None:
        """Whatever runs ends at once."""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._caught = [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        for number in self._caught:
            loop.add_signal_handler(number, self._interrupt, number)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop(*reversed(self._tasks))
        for number in self._caught:
            asyncio.get_running_loop().remove_signal_handler(number)

    def start(self, service: K) -> None:
        """Starts a service and keeps it running."""
        assert service.name not in self._tasks or service.name in self.left, service.name
        self.left.discard(service.name)
        self._ready[service.name] = asyncio.Event()
        self.restarts.setdefault(service.name, 0)
        self._tasks[service.name] = asyncio.create_task(self._keep_or_end(service), name=service.name)

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
        """Stops the named services at once, in good order: SIGTERM, SIGKILL after the grace, then whatever they left behind."""
        stopped = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)

    def _interrupt(self, number: int) -> None:
        assert self._ended is not None
        now_s, told_s = time.monotonic(), self._told_s
        if told_s is not None and now_s - told_s < AGAIN_S:  # `timeout` tells a process and its group, which is one word
            return
        self._told_s = now_s
        if told_s is not None:
            self._on_event(f"{signal.Signals(number).name} again: killed at once; a run goes on from its newest cut and journal")
            self._kill_all()
            return
        self._on_event(f"{signal.Signals(number).name}: stopping; once more kills at once")
        self._end(Outcome(code=128 + number, message=f"stopped by {signal.Signals(number).name}"))

    def _end(self, outcome: Outcome) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(outcome)

    async def _keep_or_end(self, service: K) -> None:
        """A launcher that fails itself ends the run with a word: nobody would watch the service from then on."""
        try:
            await self._keep(service)
        except Exception as error:
            log.exception("%s is not watched any more", service.name)
            self._end(Outcome(code=1, message=f"{service.name}: the launcher failed: {type(error).__name__}: {error}"))

    async def _keep(self, service: K) -> None:
        in_a_row = 0
        while True:
            started, logged_bytes = time.monotonic(), service.log.stat().st_size if service.log.exists() else 0
            self._ready[service.name].clear()
            life = await self._live(service)
            if time.monotonic() - started >= self._policy.settled_s:
                in_a_row = 0
            if outcome := self._final(service, life, in_a_row, logged_bytes):
                self._end(outcome)
                return
            if life.code == 0 and not life.again and service.leaves:
                self.left.add(service.name)
                self._on_event(f"{service.name} left with 0")
                return
            if not life.is_fault:
                self._on_event(f"{service.name} is started again: {life.words}")
                continue
            backoff_s = min(self._policy.first_backoff_s * 2**in_a_row, self._policy.longest_backoff_s)
            in_a_row += 1
            self.restarts[service.name] += 1
            self._on_event(f"{service.name} died ({life.words}); restart {in_a_row} of {self._policy.max_restarts} in {backoff_s:.1f} s, see {service.log}")
            await asyncio.sleep(backoff_s)

    def _final(self, service: K, life: Life, in_a_row: int, logged_bytes: int) -> Outcome | None:
        """What the end of a life means for the run; None: it goes on. logged_bytes: of its log, before that life."""
        if life.again:
            spent = life.is_fault and in_a_row >= self._policy.max_restarts
            return Outcome(code=1, message=f"{service.name}: {life.words}, after {in_a_row} restarts in a row") if spent else None
        if life.code == USER_MISTAKE:
            return Outcome(code=USER_MISTAKE, message=f"{service.name}: {_mistakes_in(service.log, logged_bytes)}")
        if not service.restart:
            return Outcome(code=0, message="") if life.code == 0 else Outcome(code=1, message=f"{service.name} died ({life.words}), see {service.log}")
        if (life.code != 0 or not service.leaves) and in_a_row >= self._policy.max_restarts:
            return Outcome(code=1, message=f"{service.name} died ({life.words}) after {in_a_row} restarts in a row, see {service.log}")
        return None

    @asynccontextmanager
    async def _checking(self, name: str, address: str, security: Security, health: str) -> AsyncIterator[None]:
        """Asks the service for its health while the block runs, until it has answered SERVING. address: empty: it has none."""
        checks = asyncio.create_task(self._check(name, address, security, health)) if address else None
        try:
            yield
        finally:
            if checks:
                checks.cancel()

    async def _check(self, name: str, address: str, security: Security, health: str) -> None:
        started = time.monotonic()
        await until_serving(address, security=security, service=health)
        self._ready[name].set()
        self._on_event(f"{name} serves on {address} after {time.monotonic() - started:.1f} s")


def exit_words(code: int) -> str:
    """An exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _mistakes_in(file: Path, start: int) -> str:
    """What a log says to the user from a byte offset on."""
    with file.open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join(line.removeprefix("headrace: ") for line in lines if line.startswith("headrace: ")) or f"refused its configuration, see {file}"
