"""A scorer that takes many items in one call: `@batch def score(prompts, completions, fields) -> list of what a plain scorer returns`.

Calls that are there at the same time go together; while one batch is being scored, the next one gathers. A plain function runs in one
thread of its own, so that the process goes on showing that it lives; a coroutine function runs on the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

MAX_ITEMS = 64  # in one call
_STUCK_S = 0.5  # how long a call that nobody waits for any more may go on
F = TypeVar("F", bound=Callable[..., Any])
Item = tuple[str, str, dict[str, Any]]


def batch(function: F) -> F:
    """Marks a scorer that takes lists: prompts, completions and records of the same length."""
    function.is_batch = True  # type: ignore[attr-defined]  # an attribute that `is_batch` below looks for
    return function


def is_batch(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "is_batch", False))


class Batched:
    """The function as one that is awaited for each item. Example: `await Batched(function)("1 + 1?", "2", {"answer": 2})`"""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "func", None))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch")
        self._waiting: list[tuple[Item, asyncio.Future[Any]]] = []
        self._running: asyncio.Task[None] | None = None

    async def __call__(self, prompt: str, completion: str, fields: dict[str, Any]) -> Any:
        """Raises what the function raised for this item alone."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((prompt, completion, fields), answer))
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run())
        return await answer

    async def _run(self) -> None:
        """Batch after batch, until nothing waits."""
        try:
            while self._waiting:
                taken, self._waiting = self._waiting[:MAX_ITEMS], self._waiting[MAX_ITEMS:]
                await self._score([each for each in taken if not each[1].done()])
        finally:
            self._running = None

    async def _score(self, taken: Sequence[tuple[Item, asyncio.Future[Any]]]) -> None:
        """What fails for several items is asked one by one: one of them may be to blame."""
        if not taken:
            return
        try:
            results = await self._call([item for item, _ in taken], [answer for _, answer in taken])
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # supervised edge: it is the outcome of the item, or of each
            if len(taken) == 1:
                _settle(taken[0][1], error)
                return
            for each in taken:
                await self._score([each])
            return
        for (_, answer), result in zip(taken, results, strict=True):
            _settle(answer, result)

    async def _call(self, items: Sequence[Item], answers: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Raises what the function raises, and ValueError for an answer that is not one result for each item."""
        columns = ([item[0] for item in items], [item[1] for item in items], [item[2] for item in items])
        if self._is_async:
            results = await self._function(*columns)
        else:
            results = await self._in_thread(columns, answers)
        listed = None if isinstance(results, (str, bytes, Mapping)) or not isinstance(results, Iterable) else list(results)  # arrays and tensors, too
        if listed is None or len(listed) != len(items):
            said = f"a {type(results).__name__}" if listed is None else f"{len(listed)} results"
            raise ValueError(f"a batch scorer returns a list with one result for each item; for {len(items)} items it returned {said}")
        return listed

    async def _in_thread(self, columns: tuple[list[Any], ...], answers: Sequence[asyncio.Future[Any]]) -> Any:
        """A thread cannot be killed, but its process can: once nobody waits for any of the items, the process ends and is replaced."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._called, *columns)
        while not running.done():
            await asyncio.wait({running, *(answer for answer in answers if not answer.done())}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and all(answer.done() for answer in answers):
                await asyncio.wait({running}, timeout=_STUCK_S)
                if not running.done():
                    os._exit(1)
        return running.result()

    def _called(self, *columns: list[Any]) -> Any:
        """In the thread. A future cannot hold StopIteration, which a bare `next()` raises: it would be waited for without end."""
        try:
            return self._function(*columns)
        except StopIteration as error:
            raise RuntimeError("StopIteration: next() of something that has no more items") from error


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    """A result, or the exception that takes its place; nobody may be waiting any more."""
    if answer.done():
        return
    if isinstance(result, BaseException):
        answer.set_exception(result)
    else:
        answer.set_result(result)
