"""One remote scorer: calls wait, go out in batches, are tried again or beside themselves, and end as an outcome. The asyncio layer.

      submit ──▶ waiting ──▶ pump ──▶ launch (one attempt: a task with a wall-clock limit) ──▶ settled ──▶ answers
                    ▲          ▲         │ late? hedged: a second launch for the same calls        │
                    └──────────┼─────────┴── failed, may be tried again: put back for later ◀──────┘
                               └── woken by submit, by the end of an attempt, and by the clock (`_wake_at`)

Everything runs on one event loop and nothing waits: `pump` begins what may begin now and leaves a timer for what may not. Each call has
a timer for its own deadline. A launch ends when it is answered, when it fails, or when nobody waits for any of its calls: then its task
is cancelled, which closes its connection or stream, so that the other side can stop as well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from reward_server.endpoints.attempts import Attempt, Attempts, Together
from reward_server.endpoints.failures import Failed
from reward_server.endpoints.policy import Dialect, Policy
from reward_server.endpoints.retrying import Retrying
from reward_server.endpoints.upstreams import Upstream, Upstreams
from reward_server.endpoints.waiting import Call, Waiting
from reward_server.outcome import Outcome, Reason, Unscored, clean

MAX_BATCH_BYTES = 4 << 20  # of text in one batch, beyond its first call


class Endpoint:
    """Example: `Endpoint("judge", dialect, ["http://a/score"], Policy(limit_s=10.0, attempt_s=5.0))`; then `submit`, `forget`, `stop`."""

    def __init__(
        self, name: str, dialect: Dialect, addresses: Sequence[str], policy: Policy, *, draw: Callable[[], float] = random.random
    ) -> None:
        self.name = name
        self.policy = policy
        self.upstreams = Upstreams(addresses, policy.breaker, draw=draw)
        self.retrying = Retrying(rule=policy.retry, draw=draw)
        self.waiting = Waiting(max_items=policy.queue_items, max_bytes=policy.queue_bytes)
        self._attempts = Attempts(name, dialect, policy)
        self.limiter, self.hedging, self.batching = self._attempts.limiter, self._attempts.hedging, self._attempts.batching
        self._deadlines: dict[Call, asyncio.TimerHandle] = {}  # of every call that is not over
        self._under_way: dict[Call, Together] = {}
        self._groups: set[Together] = set()
        self._wake: asyncio.Handle | None = None
        self._is_stopped = False

    @property
    def is_idle(self) -> bool:
        """Whether no call waits or is under way."""
        return not self._deadlines

    @property
    def num_running(self) -> int:
        """Attempts under way."""
        return self.limiter.num_running

    def submit(self, *, owner: Hashable, prompt: str, completion: str, fields: bytes, priority: int, answer: Callable[[Outcome], None]) -> None:
        """Queues a call; `answer` is called once on this loop, within `limit_s`."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        call = Call(
            owner=owner, prompt=prompt, completion=completion, fields=fields, priority=priority,
            came_s=now_s, deadline_s=now_s + self.policy.limit_s, answer=answer,
        )  # fmt: skip
        self._deadlines[call] = loop.call_at(call.deadline_s, self._expire, call)
        self.retrying.called()
        for victim in self.waiting.push(call):
            self._conclude(victim, self._no_room())
        self._pump_at(now_s)

    def forget(self, owner: Hashable) -> None:
        """Drops an owner's calls and cancels attempts that nobody waits for any more."""
        for call in [call for call in self._deadlines if call.owner == owner]:
            self._leave(call)
            self._end(call)

    async def stop(self) -> None:
        """Cancels everything. Calls that are not over are not answered."""
        self._is_stopped = True
        tasks = [task for group in self._groups for task in group.tasks]
        for call in list(self._deadlines):
            self._leave(call)
            self._end(call)
        if self._wake is not None:
            self._wake.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._attempts.close()

    # -- the pump: consumes waiting calls, produces launches

    def _pump_at(self, at_s: float) -> None:
        """Has the pump run at a time, or sooner if that was said before."""
        loop = asyncio.get_running_loop()
        if self._wake is not None:
            if isinstance(self._wake, asyncio.TimerHandle) and self._wake.when() > at_s:
                self._wake.cancel()
            else:
                return
        self._wake = loop.call_soon(self._pump) if at_s <= loop.time() else loop.call_at(at_s, self._pump)

    def _pump(self) -> None:
        self._wake = None
        now_s = asyncio.get_running_loop().time()
        while not self._is_stopped and (head := self.waiting.oldest(now_s)) is not None:
            upstream = self.upstreams.choose(now_s)
            if upstream is None:
                self._wait_for_breaker(now_s)
                return
            wait_s = self.limiter.wait_s(now_s)
            if wait_s is None:
                return  # the end of an attempt wakes us
            wait_s = wait_s or self.batching.wait_s(now_s, num_waiting=self.waiting.num_ready(), oldest_s=head.came_s, num_running=self.num_running)
            if wait_s > 0:
                self._pump_at(now_s + wait_s)
                return
            group = Together(calls=self.waiting.take(now_s, self.batching.size, MAX_BATCH_BYTES))
            self._groups.add(group)
            for call in group.calls:
                self._under_way[call] = group
            self._launch(group, upstream, is_hedge=False)
        if (wakes_s := self.waiting.wakes_s()) is not None:
            self._pump_at(wakes_s)

    def _wait_for_breaker(self, now_s: float) -> None:
        """No upstream may be called. What cannot wait until one may is told so at once."""
        at_s = self.upstreams.opens_again_s(now_s)
        if at_s is None:
            return  # the end of a probe wakes us
        for call in self.waiting.all():
            if call.deadline_s <= at_s:
                self.waiting.over(call)
                self._conclude(call, self._breaker_open())
        if self.waiting.num_items:
            self._pump_at(at_s)

    # -- launches: consume a group, produce its end

    def _launch(self, group: Together, upstream: Upstream, *, is_hedge: bool) -> None:
        limit_s = self._attempts.begin(group, upstream, is_hedge=is_hedge, settled=partial(self._settled, group))
        if not is_hedge and (after_s := self.hedging.after_s()) is not None and after_s < limit_s:
            group.hedge_timer = asyncio.get_running_loop().call_later(after_s, self._hedge, group, upstream)

    def _hedge(self, group: Together, first: Upstream) -> None:
        """The attempt is later than most: a second one, where all limits allow it."""
        now_s = asyncio.get_running_loop().time()
        upstream = self.upstreams.choose(now_s, without=(first,))
        if group.is_over or upstream is None or self.limiter.wait_s(now_s) != 0 or not self.hedging.take():
            return
        self._launch(group, upstream, is_hedge=True)

    def _settled(self, group: Together, task: Attempt) -> None:
        """An attempt has ended. The first success of a group ends it; its failure counts when no other attempt is under way."""
        ended = self._attempts.ended(group, task)
        now_s = asyncio.get_running_loop().time()
        if group.is_over or ended is None:
            pass  # nobody waits for it
        elif not isinstance(ended, Failed):
            self._close(group)
            for call, outcome in zip(group.calls, ended, strict=True):
                if not call.is_over:
                    self._conclude(call, outcome)
        elif not group.tasks:
            self._close(group)
            self._failed(group.calls, ended, now_s)
        if not self._is_stopped:
            self._pump_at(now_s)

    # -- ends of groups and calls

    def _close(self, group: Together) -> None:
        """Nothing more is wanted of a group: whatever it still has under way is cancelled."""
        group.is_over = True
        self._groups.discard(group)
        if group.hedge_timer is not None:
            group.hedge_timer.cancel()
        for task in group.tasks:
            task.cancel()
        for call in group.calls:
            self._under_way.pop(call, None)

    def _failed(self, calls: list[Call], failed: Failed, now_s: float) -> None:
        """Each call is put back for another attempt, or unscored. A batch that was refused whole is asked one by one: one call may be to blame."""
        self.batching.too_much(len(calls))
        for call in calls:
            if call.is_over:
                continue
            if len(calls) > 1 and not failed.is_retryable:
                call.is_alone = True
                self.waiting.put_back(call, now_s)
                continue
            call.num_refusals += failed.kind == "overloaded"
            call.num_failures += failed.kind != "overloaded"
            wait_s = self.retrying.wait_s(failed, num_failures=call.num_failures, num_refusals=call.num_refusals, left_s=call.deadline_s - now_s)
            if wait_s is None:
                self._conclude(call, Unscored(clean(f"{failed.detail}{_after(call)}"), failed.kind))
            else:
                self.waiting.put_back(call, now_s + wait_s)

    def _expire(self, call: Call) -> None:
        """A call's own deadline has passed."""
        was_asked = call in self._under_way or call.num_failures > 0
        self._leave(call)
        self._conclude(call, self._too_late(call, was_asked=was_asked))

    def _leave(self, call: Call) -> None:
        """Takes a call out of where it is; cancels a group of which nobody waits for any call."""
        group = self._under_way.pop(call, None)
        if group is None:
            self.waiting.over(call)
            return
        call.is_over = True
        if all(each.is_over for each in group.calls):
            self._close(group)

    def _conclude(self, call: Call, outcome: Outcome) -> None:
        self._end(call)
        call.answer(outcome)

    def _end(self, call: Call) -> None:
        call.is_over = True
        self._deadlines.pop(call).cancel()

    # -- words

    def _no_room(self) -> Unscored:
        words = f"{self.name}: {self.policy.queue_items} calls or {self.policy.queue_bytes} bytes wait already (queue_items, queue_bytes)"
        return Unscored(words, "overloaded")

    def _breaker_open(self) -> Unscored:
        return Unscored(f"{self.name}: every upstream keeps failing ({', '.join(each.address for each in self.upstreams.all)}); none is called before the call's limit_s={self.policy.limit_s:g}", "breaker_open")

    def _too_late(self, call: Call, *, was_asked: bool) -> Unscored:
        now_s = asyncio.get_running_loop().time()
        reason: Reason = "timeout"
        if not was_asked:
            reason = "breaker_open" if self.upstreams.choose(now_s) is None else "overloaded"
        words = "no answer" if was_asked else "no attempt could begin"
        return Unscored(f"{self.name}: {words} within limit_s={self.policy.limit_s:g}{_after(call)}", reason)


def _after(call: Call) -> str:
    """How often it was tried, for people."""
    tried = call.num_failures + call.num_refusals
    return f" (attempt {tried})" if tried > 1 else ""
