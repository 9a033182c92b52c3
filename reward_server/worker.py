"""A scorer process: `python -m reward_server.worker FD PARENT`. The only place where user code runs.

It reads batches from the socket FD and answers each call as soon as it is done, so that the service knows which call
is running and can kill it. Calls of a sync function run one after another, those of an async one together.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable
from typing import Any

from reward_server import channel, fields, registry
from reward_server.outcome import Outcome, Unscored, checked, clean

BEAT_S = 0.1
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Loads the scorers, then answers until the service is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    connection = socket.socket(fileno=descriptor)
    received = channel.messages(connection)
    schema, memory_bytes, scorers = next(received)
    assert schema == channel.SCHEMA, f"service speaks schema {schema}, this process {channel.SCHEMA}"
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        calls = [_Scorer(connection, name, use, args, limit_s) for name, use, args, limit_s in scorers]
    except ValueError as error:
        connection.sendall(channel.encode([channel.SCHEMA, False, clean(" ".join(str(error).split()))]))
        return
    connection.sendall(channel.encode([channel.SCHEMA, True, [[call.loaded.description, call.loaded.is_async] for call in calls]]))
    for index, items in received:
        calls[index].answer_all(items)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the service dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class _Scorer:
    """One configured scorer and where its answers go."""

    def __init__(self, connection: socket.socket, name: str, use: str, args: dict[str, Any], limit_s: float) -> None:
        try:
            self.loaded = registry.load(use, args)
        except ValueError as error:
            raise ValueError(f"scorer {name!r}: {error}") from None
        self._connection = connection
        self._limit_s = limit_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer_all(self, items: list[tuple[int, str, str, bytes]]) -> None:
        """Answers each item of a batch."""
        if self.loaded.is_async:
            self._own_loop().run_until_complete(self._together(items))
            return
        for seq, prompt, completion, data in items:
            self._answer(seq, self._one(prompt, completion, data))

    def _one(self, prompt: str, completion: str, data: bytes) -> Outcome:
        """Calls a sync function. Whatever it raises is an outcome, SystemExit and MemoryError too."""
        try:
            result = self.loaded.call(prompt, completion, fields.decode(data))
            if inspect.isawaitable(result):  # a plain function that returns a coroutine
                result = self._own_loop().run_until_complete(_awaited(result))
            return checked(result)
        except BaseException as error:  # the supervised edge: the service counts it
            return _raised(error)

    async def _together(self, items: list[tuple[int, str, str, bytes]]) -> None:
        """Runs the calls of an async function side by side, with signs of life meanwhile."""
        beat = asyncio.ensure_future(self._beat())
        try:
            await asyncio.gather(*(self._one_async(*item) for item in items))
        finally:
            beat.cancel()

    async def _one_async(self, seq: int, prompt: str, completion: str, data: bytes) -> None:
        outcome: Outcome
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                outcome = checked(await self.loaded.call(prompt, completion, fields.decode(data)))
        except BaseException as error:  # the supervised edge: the service counts it
            outcome = Unscored(f"no answer within limit_s={self._limit_s:g}", "timeout") if limit.expired() else _raised(error)
        self._answer(seq, outcome)

    async def _beat(self) -> None:
        while True:
            self._connection.sendall(channel.encode([]))
            await asyncio.sleep(BEAT_S)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """One event loop for the life of the process, so that a scorer may keep its connections."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _answer(self, seq: int, outcome: Outcome) -> None:
        self._connection.sendall(channel.encode(channel.answer(seq, outcome)))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _raised(error: BaseException) -> Unscored:
    try:
        words = str(error)
    except Exception:  # an exception may fail to print itself
        words = "(no text)"
    return Unscored(clean(f"{type(error).__name__}: {words}"), "error")


if __name__ == "__main__":
    assert threading.current_thread() is threading.main_thread()  # scorers may use signal.alarm, which works in the main thread only
    main()
    os._exit(0)  # user threads that never end do not keep the process
