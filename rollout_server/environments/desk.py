"""The sessions that an environment server holds for its callers.

    sweep    consumes sessions that nobody asked for in a while, closes them; unblocked by time
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollout_server.environments.host import Host, Session
from rollout_server.environments.interface import Action, EnvironmentFailure, Message, Step, Task

SWEEP_S = 1.0
Answer = TypeVar("Answer")


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    """One session, and what it has answered: a call that is made again gets the same."""

    environment: str
    asked_s: float = field(default_factory=time.monotonic)
    session: Session | None = None
    answers: dict[int, asyncio.Task[Any]] = field(default_factory=dict)  # by turn; -1: reset


class Desk:
    """Example: `desk = Desk({"sums": host}, idle_s=60); await desk.reset("s1", "sums", task); await desk.step("s1", action); await desk.close("s1")`"""

    def __init__(self, hosts: Mapping[str, Host], *, idle_s: float) -> None:
        self.hosts = hosts
        self.num_idle: Counter[str] = Counter()  # sessions closed because nobody asked, by environment
        self._idle_s = idle_s
        self._held: dict[str, _Held] = {}

    def num_open(self, environment: str) -> int:
        return sum(held.environment == environment for held in self._held.values())

    async def reset(self, session_id: str, environment: str, task: Task) -> list[Message]:
        """Raises ValueError for a caller's mistake, EnvironmentFailure."""
        name = environment or (next(iter(self.hosts)) if len(self.hosts) == 1 else "")
        if not session_id or name not in self.hosts:
            raise ValueError(f"session_id={session_id!r}, environment={environment!r}: give an id, and one of {', '.join(self.hosts)}")
        held = self._held.setdefault(session_id, _Held(environment=name))

        async def begin() -> list[Message]:
            held.session = await self.hosts[name].open()
            return await held.session.reset(task)

        return await self._once(held, -1, begin)

    async def step(self, session_id: str, action: Action) -> Step:
        """Raises LookupError for an unknown session, RuntimeError for a turn that is not due, EnvironmentFailure."""
        held = self._held.get(session_id)
        if held is None or -1 not in held.answers:
            raise LookupError(f"there is no session {session_id!r}: it was closed, was idle for too long, or was lost with its server")
        due = max(held.answers) + 1
        if action.turn not in held.answers and action.turn != due:
            raise RuntimeError(f"turn {action.turn} of session {session_id!r}, but turn {due} is due")
        session = held.session
        if session is None:
            raise EnvironmentFailure("unavailable", "the session did not begin")
        return await self._once(held, action.turn, lambda: session.step(action))

    async def close(self, session_id: str) -> None:
        """Idempotent."""
        held = self._held.pop(session_id, None)
        if held is None:
            return
        for answer in held.answers.values():
            answer.cancel()
        await asyncio.gather(*held.answers.values(), return_exceptions=True)
        if held.session is not None:
            await held.session.close()

    async def sweep(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._idle_s))
            for session_id, held in list(self._held.items()):
                if time.monotonic() - held.asked_s > self._idle_s:
                    self.num_idle[held.environment] += 1
                    await self.close(session_id)

    async def stop(self) -> None:
        for session_id in list(self._held):
            await self.close(session_id)
        for host in self.hosts.values():
            await host.stop()

    async def _once(self, held: _Held, turn: int, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer of a turn, made once. A caller that gives up leaves the call running: it may ask again."""
        held.asked_s = time.monotonic()
        if turn not in held.answers:
            held.answers = {number: answer for number, answer in held.answers.items() if number >= turn - 1 or number == -1}
            held.answers[turn] = asyncio.ensure_future(make())
        try:
            answer: Answer = await asyncio.shield(held.answers[turn])
            return answer
        except asyncio.CancelledError:
            if held.answers[turn].cancelled():
                raise EnvironmentFailure("lost", "the session was closed during the call") from None
            raise
        finally:
            held.asked_s = time.monotonic()
