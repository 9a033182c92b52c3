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
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

from protos import stacks
from reward_server import channel, fields, registry
from reward_server.outcome import Answered, Unscored, checked, checked_group, clean

BEAT_S = 0.1
LONG_S = 0.05  # after a sync call of so long it is worth a look whether the next ones have been cancelled
_PR_SET_PDEATHSIG = 1
Completion = str | list[str]  # a list: a whole group


def main() -> None:
    """Loads the scorers, then answers until the service is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    stacks.answering()
    connection = socket.socket(fileno=descriptor)
    inbox = channel.Inbox(connection)
    received = inbox.all()
    schema, memory_bytes, scorers = next(received)
    assert schema == channel.SCHEMA, f"service speaks schema {schema}, this process {channel.SCHEMA}"
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    try:
        calls = [_Scorer(inbox, index, *scorer) for index, scorer in enumerate(scorers)]
    except ValueError as error:
        connection.sendall(channel.encode([channel.SCHEMA, False, clean(" ".join(str(error).split()))]))
        return
    loaded = [call.loaded for call in calls]
    connection.sendall(channel.encode([channel.SCHEMA, True, [[each.description, each.is_async, each.version, each.is_deterministic] for each in loaded]]))
    for index, items in received:
        if index != channel.CANCEL:  # too late: what it names has been answered
            calls[index].answer_all(items)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when the service dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class _Scorer:
    """One configured scorer, where its calls come from and its answers go."""

    def __init__(self, inbox: channel.Inbox, index: int, name: str, use: str, args: dict[str, Any], limit_s: float) -> None:
        try:
            self.loaded = registry.load(use, args)
        except ValueError as error:
            raise ValueError(f"scorer {name!r}: {error}") from None
        self._inbox = inbox
        self._index = index
        self._limit_s = limit_s
        self._running: dict[int, asyncio.Task[Answered]] = {}  # async calls by seq
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()

    def answer_all(self, items: list[tuple[int, str, Completion, bytes]]) -> None:
        """Answers each item of a batch."""
        if self.loaded.is_async:
            self._own_loop().run_until_complete(self._together(items))
            return
        cancelled: set[int] = set()
        for seq, prompt, completion, data in items:
            if seq in cancelled:
                self._answer(seq, Unscored("cancelled before it was made", "unavailable"))
                continue
            began_s = time.monotonic()
            self._answer(seq, self._one(prompt, completion, data))
            if time.monotonic() - began_s > LONG_S:
                cancelled |= self._cancelled()

    def _cancelled(self) -> set[int]:
        """What the service has cancelled since the last look."""
        self._inbox.read_if_any()
        seqs: set[int] = set()
        while self._inbox.waiting and self._inbox.waiting[0][0] == channel.CANCEL:
            seqs.update(self._inbox.waiting.popleft()[1])
        return seqs

    def _one(self, prompt: str, completion: Completion, data: bytes) -> Answered:
        """Calls a sync function. Whatever it raises is an outcome, SystemExit and MemoryError too."""
        try:
            result = self.loaded.call(prompt, completion, fields.decode(data))
            if inspect.isawaitable(result):  # a plain function that returns a coroutine
                result = self._own_loop().run_until_complete(_awaited(result))
            return _judged(result, completion)
        except BaseException as error:  # the supervised edge: the service counts it
            return _raised(error)

    async def _together(self, items: list[tuple[int, str, Completion, bytes]]) -> None:
        """Runs the calls of an async function side by side, and those that come meanwhile, with signs of life."""
        loop = asyncio.get_running_loop()
        beat = loop.create_task(self._beat())
        loop.add_reader(self._inbox.connection, self._take_more)
        try:
            self._begin(items)
            self._take_waiting()
            while self._running:
                await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._inbox.connection)
            beat.cancel()

    def _begin(self, items: list[tuple[int, str, Completion, bytes]]) -> None:
        for seq, prompt, completion, data in items:
            self._running[seq] = asyncio.get_running_loop().create_task(self._one_async(prompt, completion, data))
            self._running[seq].add_done_callback(partial(self._finish, seq))

    def _finish(self, seq: int, task: asyncio.Task[Answered]) -> None:
        """Answers an async call; one that was cancelled before its first step has no outcome of its own."""
        del self._running[seq]
        self._answer(seq, Unscored("cancelled before it was made", "unavailable") if task.cancelled() else task.result())

    def _take_more(self) -> None:
        """Called when the service has sent something."""
        try:
            self._inbox.read()
        except EOFError:
            os._exit(0)
        self._take_waiting()

    def _take_waiting(self) -> None:
        """Begins more of the same and cancels; once all is answered, a batch of another scorer may wait, too, and stays."""
        waiting = self._inbox.waiting
        while waiting and waiting[0][0] in (self._index, channel.CANCEL):
            index, items = waiting.popleft()
            if index != channel.CANCEL:
                self._begin(items)
            else:
                for task in filter(None, map(self._running.get, items)):
                    task.cancel()

    async def _one_async(self, prompt: str, completion: Completion, data: bytes) -> Answered:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                return _judged(await self.loaded.call(prompt, completion, fields.decode(data)), completion)
        except BaseException as error:  # the supervised edge: the service counts it
            return Unscored(f"no answer within limit_s={self._limit_s:g}", "timeout") if limit.expired() else _raised(error)

    async def _beat(self) -> None:
        while os.getpid() == self._pid:
            self._inbox.connection.sendall(channel.encode([]))
            await asyncio.sleep(BEAT_S)

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """One event loop for the life of the process, so that a scorer may keep its connections."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _answer(self, seq: int, outcome: Answered) -> None:
        if os.getpid() != self._pid:  # a child that the function forked and that came back from it: the answer is its parent's to give
            os._exit(0)
        self._inbox.connection.sendall(channel.encode(channel.answer(seq, outcome)))


def _judged(result: object, completion: Completion) -> Answered:
    return checked(result) if isinstance(completion, str) else checked_group(result, len(completion))


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
