"""Attempts at upstreams: begun within their limits, and what everything that learns from them is told when they end.

It decides nothing about calls: the endpoint launches, and does with an attempt's end what the calls need.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reward_server.endpoints.batching import Batching
from reward_server.endpoints.failures import Failed
from reward_server.endpoints.hedging import Hedging
from reward_server.endpoints.limiter import Limiter
from reward_server.endpoints.policy import Dialect, Policy
from reward_server.endpoints.upstreams import Upstream
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome

log = logging.getLogger("headrace.reward_server.endpoint")

Attempt = asyncio.Task[Sequence[Outcome]]


@dataclass(kw_only=True, slots=True, eq=False)
class Launch:
    """One attempt under way at one upstream."""

    upstream: Upstream
    is_probe: bool
    is_hedge: bool
    began_s: float


@dataclass(kw_only=True, slots=True, eq=False)
class Together:
    """Calls that are asked together, and the attempts to do so: one, or two once it is hedged."""

    calls: list[Call]
    tasks: dict[Attempt, Launch] = field(default_factory=dict)
    hedge_timer: asyncio.TimerHandle | None = None
    is_over: bool = False


class Attempts:
    """Example: `limit_s = attempts.begin(together, upstream, is_hedge=False, settled=print)`; at the task's end `attempts.ended(together, task)`."""

    def __init__(self, name: str, dialect: Dialect, policy: Policy) -> None:
        self.limiter = Limiter(limits=policy.limits)
        self.hedging = Hedging(rule=policy.hedge)
        self.batching = Batching(rule=policy.batch)
        self._name = name
        self._dialect = dialect
        self._attempt_s = policy.attempt_s

    def begin(self, together: Together, upstream: Upstream, *, is_hedge: bool, settled: Callable[[Attempt], None]) -> float:
        """An attempt for these calls; `settled` is called when it ends. Returns its limit in seconds."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self.limiter.begin(now_s)
        self.hedging.called()
        launch = Launch(upstream=upstream, is_probe=upstream.begin(now_s), is_hedge=is_hedge, began_s=now_s)
        limit_s = min(self._attempt_s, max(call.deadline_s for call in together.calls) - now_s)
        task = loop.create_task(self._ask(upstream, together.calls, limit_s))
        together.tasks[task] = launch
        task.add_done_callback(settled)
        return limit_s

    def ended(self, together: Together, task: Attempt) -> Sequence[Outcome] | Failed | None:
        """What came of an attempt: outcomes, its failure, or None where it was cancelled."""
        launch = together.tasks.pop(task)
        now_s = asyncio.get_running_loop().time()
        if task.cancelled():
            self.limiter.end(is_success=False)
            launch.upstream.abandoned(is_probe=launch.is_probe)
            return None
        error = task.exception()
        if error is None and len(task.result()) != len(together.calls):
            error = AssertionError(f"{len(task.result())} outcomes of {len(together.calls)} calls")
        if error is not None:
            failed = self._as_failure(launch, error)
            self._note_failure(launch, failed, now_s)
            return failed
        self._note_success(launch, len(together.calls), now_s)
        if not together.is_over:
            self.hedging.num_won += launch.is_hedge
        return task.result()

    async def close(self) -> None:
        """Closes connections."""
        await self._dialect.close()

    async def _ask(self, upstream: Upstream, calls: Sequence[Call], limit_s: float) -> Sequence[Outcome]:
        """One attempt. Its limit is wall-clock time, whatever the other side sends meanwhile."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await self._dialect.ask(upstream.address, calls, limit_s)
        except TimeoutError:
            if limit.expired():
                raise Failed("timeout", f"{upstream.address} gave no answer within {limit_s:.3g} s", is_retryable=True, is_ailing=True) from None
            raise

    def _note_success(self, launch: Launch, num_calls: int, now_s: float) -> None:
        took_s = now_s - launch.began_s
        self.limiter.end(is_success=True)
        launch.upstream.succeeded(took_s, is_probe=launch.is_probe)
        self.hedging.measured(took_s)
        self.batching.took(num_calls, took_s)

    def _note_failure(self, launch: Launch, failed: Failed, now_s: float) -> None:
        self.limiter.end(is_success=False)
        launch.upstream.failed(now_s, is_ailing=failed.is_ailing, is_probe=launch.is_probe)
        if failed.kind == "overloaded":
            self.limiter.refused(now_s, failed.retry_after_s)

    def _as_failure(self, launch: Launch, error: BaseException) -> Failed:
        if isinstance(error, Failed):
            return error
        log.error("scorer %s: %s could not be asked", self._name, launch.upstream.address, exc_info=error)
        return Failed("error", f"{type(error).__name__}: {error}", is_retryable=False)
