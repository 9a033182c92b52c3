"""Sessions of one environment in processes that can be killed.

    open     consumes a place, produces a session in a process with room (a new one where none has), waits for a place, unblocked by a close
    close    produces a place; its process ends where it failed, leaked, or has played enough

An environment that is not shared (sessions_in_process = 1) takes no other sample along, whatever it does.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from protos.scrubbing import scrubbed
from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments import wire
from rollout_server.environments.interface import REASONS, Action, EnvironmentFailure, Message, Step, Task
from rollout_server.environments.process import DiedLoading, EnvironmentProcess

logger = logging.getLogger("headrace.rollout.environments")
MAX_STARTS = 3  # of a process for one session
IDLE_PROCESSES = 16  # kept for the next sessions
Answer = TypeVar("Answer")
ENDS = ("closed", *REASONS, "leaked")


class Session(Protocol):
    """One sample's environment. Every method raises EnvironmentFailure; `close` never does, and is called on every path."""

    async def reset(self, task: Task) -> list[Message]: ...

    async def step(self, action: Action) -> Step: ...

    async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
        """Of an agent: its whole sample; what it says that it earned, or None."""

    async def close(self) -> None: ...


class Host(Protocol):
    """Where sessions of one environment come from."""

    tally: Counter[str]  # sessions by how they ended (ENDS); "leaked" beside the end of its last session

    async def check(self) -> None:
        """Raises ValueError in one line where it could never play."""

    async def open(self) -> Session:
        """Waits for a place. Raises EnvironmentFailure."""

    async def stop(self) -> None:
        """Ends everything. Idempotent."""


class ProcessHost:
    """Example: `host = ProcessHost(config); await host.check(); session = await host.open(); ...; await session.close(); await host.stop()`"""

    def __init__(self, config: EnvironmentConfig, *, environment: Mapping[str, str] | None = None) -> None:
        """environment: variables that its processes see; None: those of this process without credentials."""
        self.config = config
        self.tally: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self._environment = scrubbed(os.environ) if environment is None else environment
        self._places = asyncio.Semaphore(config.max_sessions)
        self._starting = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._processes: set[EnvironmentProcess] = set()
        self._numbers = itertools.count(1)
        self._is_stopped = False

    @property
    def num_sessions(self) -> int:
        return sum(len(process.sessions) for process in self._processes)

    @property
    def num_processes(self) -> int:
        return len(self._processes)

    async def check(self) -> None:
        process = EnvironmentProcess(self.config, self._environment)
        self._processes.add(process)
        try:
            await process.start()
        except BaseException:
            await self._end(process)
            raise

    async def open(self) -> HostedSession:
        await self._places.acquire()
        try:
            process, number = await self._process()
        except BaseException:
            self._places.release()
            raise
        return HostedSession(self, process, number)

    async def stop(self) -> None:
        self._is_stopped = True
        for process in list(self._processes):
            process.killed_for = "the server stops"
            await self._end(process)

    async def _process(self) -> tuple[EnvironmentProcess, int]:
        """One with room, and the number of the session that has its place there."""
        number = next(self._numbers)
        for process in self._processes:
            if self._has_room(process):
                return self._seated(process, number)
        async with self._starting:
            if self._is_stopped:
                raise EnvironmentFailure("unavailable", "the server stops")
            for process in self._processes:
                if self._has_room(process):
                    return self._seated(process, number)
            return await self._begun(number), number

    async def _begun(self, number: int) -> EnvironmentProcess:
        """A new process, with the session in it. One that dies while it is loaded is started again: it was seen to come up at the server's start."""
        for start in range(1, MAX_STARTS + 1):
            process = EnvironmentProcess(self.config, self._environment)
            self._seated(process, number)
            self._processes.add(process)
            try:
                await process.start()
                return process
            except ValueError as error:
                await self._end(process)
                if start < MAX_STARTS and isinstance(error, DiedLoading) and not self._is_stopped:
                    logger.warning("%s; it is started again", error)
                    continue
                self.tally["unavailable"] += 1
                raise EnvironmentFailure("unavailable", str(error)) from None
            except BaseException:
                await self._end(process)
                raise
        raise AssertionError("the last start returns or raises")

    def _has_room(self, process: EnvironmentProcess) -> bool:
        c = self.config
        return process.is_up and not process.is_dead and len(process.sessions) < c.sessions_in_process and process.num_opened < c.sessions_before_restart

    def _seated(self, process: EnvironmentProcess, number: int) -> tuple[EnvironmentProcess, int]:
        process.sessions.add(number)
        process.num_opened += 1
        return process, number

    async def _end(self, process: EnvironmentProcess) -> None:
        self._processes.discard(process)
        await process.kill()

    async def leave(self, process: EnvironmentProcess, number: int, failure: EnvironmentFailure | None) -> None:
        """A session is over; `failure` that it ended with. Its place is free whatever happens."""
        try:
            leaked = False
            try:
                leaked = await process.close(number, self.config.step_timeout_s)
            except EnvironmentFailure as error:
                failure = failure or error
            self.tally[failure.reason if failure else "closed"] += 1
            self.tally["leaked"] += leaked
            alone = not process.sessions
            spoilt = leaked or (failure is not None and self.config.sessions_in_process == 1)
            idle = sum(not other.sessions for other in self._processes)
            if process.is_dead or (alone and (spoilt or process.num_opened >= self.config.sessions_before_restart or idle > IDLE_PROCESSES)):
                await self._end(process)
            if leaked:
                logger.warning("environment %s left descriptors, threads or processes behind; its process %d was ended", self.config.name, process.pid)
        finally:
            process.sessions.discard(number)
            self._places.release()


class HostedSession:
    """A session of a ProcessHost."""

    def __init__(self, host: ProcessHost, process: EnvironmentProcess, number: int) -> None:
        self._host, self._process, self._number = host, process, number
        self._failure: EnvironmentFailure | None = None
        self._is_closed = False

    async def reset(self, task: Task) -> list[Message]:
        return self._read(wire.observation_in, await self._call("reset", wire.task_out(task), limit_s=self._host.config.reset_timeout_s))

    async def step(self, action: Action) -> Step:
        return self._read(wire.step_in, await self._call("step", wire.action_out(action), limit_s=self._host.config.step_timeout_s))

    async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
        return self._read(wire.earned, await self._call("run", wire.task_out(task), base_url, api_key, limit_s=self._host.config.run_timeout_s))

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._host.leave(self._process, self._number, self._failure)

    async def _call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        try:
            return await self._process.call(method, self._number, *arguments, limit_s=limit_s)
        except EnvironmentFailure as failure:
            self._failure = failure
            raise

    def _read(self, read: Callable[[Any], Answer], said: Any) -> Answer:
        try:
            return read(said)
        except EnvironmentFailure as failure:
            self._failure = failure
            raise
