"""The engine's one lane: actions on it are carried out one after another, and a discard overtakes what may be given up.

Lane: consumes actions, produces the events that they end with, waits for the engine, unblocked by an action's own deadline or by a discard.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from rollout_server.weights.transaction import Action, ActionKind, Event

_ABANDONABLE = (ActionKind.RECEIVE, ActionKind.FETCH)


class Lane:
    """`execute` carries one action out; its failure is an event. `ended` takes the event. All methods on one event loop."""

    def __init__(self, execute: Callable[[Action], Awaitable[Event | None]], ended: Callable[[Event], None]) -> None:
        self._execute = execute
        self._ended = ended
        self._waiting: deque[Action] = deque()
        self._filled = asyncio.Event()
        self._running: tuple[Action, asyncio.Future[Event | None]] | None = None

    @property
    def idle(self) -> bool:
        return not self._waiting and self._running is None

    def add(self, action: Action) -> None:
        """Behind what waits. A discard takes transfers out of the lane and cancels one that runs; a commit is never cut off."""
        if action.kind is ActionKind.DISCARD:
            self._waiting = deque(queued for queued in self._waiting if queued.kind not in _ABANDONABLE)
            if self._running is not None and self._running[0].kind in _ABANDONABLE:
                self._running[1].cancel()
        self._waiting.append(action)
        self._filled.set()

    async def run(self) -> None:
        """Until cancelled; what runs then is cancelled too."""
        try:
            while True:
                await self._filled.wait()
                if not self._waiting:
                    self._filled.clear()
                    continue
                await self._carry_out(self._waiting.popleft())
        finally:
            if self._running is not None:
                self._running[1].cancel()

    async def _carry_out(self, action: Action) -> None:
        task = asyncio.ensure_future(self._execute(action))
        self._running = (action, task)
        await asyncio.wait({task})  # unlike `await task`, raises only when run() itself is cancelled
        self._running = None
        if not task.cancelled() and (event := task.result()) is not None:
            self._ended(event)
