"""One environment process as its rollout server sees it: started, called with a wall-clock limit, killed with everything it made.

A process and its children carry a mark in their environment, by which those that left its session and its process group are found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from rollout_server.environment_config import EnvironmentConfig
from rollout_server.environments import wire
from rollout_server.environments.interface import REASONS, EnvironmentFailure

MARK = "HEADRACE_ENVIRONMENT_MARK"
KILL_S = 5.0


class DiedLoading(ValueError):
    """The process ended while it imported the environment, without a word about why."""


class EnvironmentProcess:
    """Sessions are numbered by whoever opens them. Example: `await process.start(); await process.call("reset", 1, task, limit_s=5)`"""

    def __init__(self, config: EnvironmentConfig, environment: Mapping[str, str]) -> None:
        self._config = config
        self._mark = secrets.token_hex(8)
        self._environment = {**environment, MARK: self._mark}
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._birth: list[int] = []
        self.sessions: set[int] = set()  # open ones
        self.num_opened = 0
        self.is_up = False  # it has imported the environment
        self.is_dead = False
        self._is_reaped = False
        self.killed_for = ""  # the session's failure that others are lost to

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Returns once it has imported the environment. Raises ValueError in one line when it cannot."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollout_server.environments.worker", str(theirs.fileno()), str(os.getpid()), pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env=self._environment,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=wire.MAX_BYTES)
        messages = _Messages(reader)
        c = self._config
        self._writer.write(msgpack.packb([wire.SCHEMA, c.use, c.options, c.agent, c.memory_mb]))
        try:
            async with asyncio.timeout(c.load_timeout_s):
                said = await messages.next()
        except TimeoutError:
            await self.kill()
            raise ValueError(f"environment {c.name}: use={c.use} was not loaded within load_timeout_s={c.load_timeout_s:g}; raise it, or import less") from None
        except (EOFError, ValueError) as error:
            with contextlib.suppress(TimeoutError):  # what it ended with by itself, not by our signal
                await asyncio.wait_for(self._process.wait(), 1.0)
            code = self._process.returncode
            await self.kill()
            raise DiedLoading(f"environment {c.name}: use={c.use}: its process ended with {code} while it was loaded ({error}); try `python -c 'import {c.use.partition(':')[0]}'`") from None
        if not said[0]:
            await self.kill()
            raise ValueError(f"environment {c.name}: use={c.use}: {said[1]}")
        self._birth, self.is_up = said[1], True
        self._reading = asyncio.create_task(self._read(messages))

    async def call(self, method: str, session: int, *arguments: Any, limit_s: float) -> Any:
        """The answer. Raises EnvironmentFailure; after a timeout the process is dead, with all sessions in it."""
        if self.is_dead:
            raise EnvironmentFailure("lost", f"its process was killed ({self.killed_for})") if self.killed_for else EnvironmentFailure("died", "its process had ended")
        assert self._writer is not None
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(msgpack.packb([number, method, session, *arguments]))
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError:
            self.killed_for = f"another sample of it: no answer to {method} within {limit_s:g} s"
            await self.kill()
            raise EnvironmentFailure("timeout", f"no answer to {method} within {limit_s:g} s") from None
        finally:
            self._calls.pop(number, None)

    async def close(self, session: int, limit_s: float) -> bool:
        """Ends a session. Whether it left something behind: descriptors, threads, processes. Raises EnvironmentFailure as `call`."""
        try:
            now = await self.call("close", session, limit_s=limit_s)
        finally:
            self.sessions.discard(session)
        if self.sessions or not (isinstance(now, list) and len(now) == len(self._birth) and all(isinstance(n, int) for n in now)):
            return False
        return any(n > born + spare for n, born, spare in zip(now, self._birth, _SPARE, strict=True))

    async def kill(self) -> None:
        """Kills it and all that it made, and waits until they are gone. Idempotent."""
        self.is_dead = True
        if self._process is None or self._is_reaped:
            return
        self._is_reaped = True
        end_s = asyncio.get_running_loop().time() + KILL_S
        while (family := self._family()) and asyncio.get_running_loop().time() < end_s:  # again, for one that was just being made
            for pid in family:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), KILL_S)
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        self._fail_all()

    def _family(self) -> list[int]:
        """Whatever lives and carries its mark: the process, its children, and those of them that left its session."""
        found = []
        mark = f"{MARK}={self._mark}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{entry}/environ").read_bytes():  # empty once it is dead and only waits to be noticed
                        found.append(int(entry))
        return found

    async def _read(self, messages: _Messages) -> None:
        try:
            while True:
                self._take(await messages.next())
        except asyncio.CancelledError:
            raise
        except (EOFError, ValueError, OSError):
            self.is_dead = True
            self._fail_all()

    def _take(self, said: Any) -> None:
        """One answer. Raises ValueError for what is none: then the process cannot be trusted with any further."""
        if not isinstance(said, list) or len(said) != 3 or not isinstance(said[0], int):
            raise ValueError("no answer")
        number, reason, answer = said
        waiting = self._calls.get(number)
        if waiting is None or waiting.done():
            return
        if reason is None:
            waiting.set_result(answer)
        else:
            waiting.set_exception(EnvironmentFailure(reason if reason in REASONS else "error", str(answer)[:2000]))

    def _fail_all(self) -> None:
        for waiting in self._calls.values():
            if not waiting.done():
                failure = EnvironmentFailure("lost", f"its process was killed ({self.killed_for})") if self.killed_for else EnvironmentFailure("died", "its process ended during the call")
                waiting.set_exception(failure)


_SPARE = (2, 1, 0)  # descriptors and threads that a library may keep after its first use without leaking


class _Messages:
    """Whole messages of a stream."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._unpacker = msgpack.Unpacker(max_buffer_size=wire.MAX_BYTES)

    async def next(self) -> Any:
        """Raises EOFError at the end, ValueError for what is no message or too large a one."""
        while True:
            try:
                return next(self._unpacker)
            except StopIteration:
                pass
            except Exception as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None
            data = await self._reader.read(1 << 18)
            if not data:
                raise EOFError("the process is gone")
            try:
                self._unpacker.feed(data)
            except Exception as error:
                raise ValueError(f"{type(error).__name__}: {error}") from None
