"""Calls that wait for their attempt: bounded by count and bytes, the more urgent first, some not before a time. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from reward_server.outcome import Outcome


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One item to be scored by a remote scorer.

    Example: `Call(owner=stream, prompt="1 + 1?", completion="2", fields=b"", priority=0, came_s=1.0, deadline_s=11.0, answer=print)`
    """

    owner: Hashable  # whom it is for; forgotten together
    prompt: str
    completion: str
    fields: bytes  # serialized Struct
    priority: int  # the higher goes first
    came_s: float  # on the endpoint's clock
    deadline_s: float  # as above; unanswered then, it is unscored
    answer: Callable[[Outcome], None]  # called once, unless the owner is forgotten
    is_alone: bool = False  # goes in a batch of its own: it may be what failed a batch before
    is_over: bool = False  # answered, or nobody waits for it any more
    num_failures: int = 0
    num_refusals: int = 0
    serial: int = 0  # order of coming, given by the queue: a call that is put back keeps its place

    @property
    def num_bytes(self) -> int:
        """Size of its text and fields."""
        return len(self.prompt) + len(self.completion) + len(self.fields)


class Waiting:
    """Example: `Waiting(max_items=4096, max_bytes=64 << 20)`. Calls that are over are passed by and cost no room."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._ready: list[tuple[int, int, Call]] = []  # heap of (-priority, serial, call)
        self._later: list[tuple[float, int, Call]] = []  # heap of (not before, serial, call)
        self._serial = itertools.count()
        self.num_items = 0  # that are not over
        self.num_bytes = 0

    def push(self, call: Call) -> list[Call]:
        """Adds a call. Returns those for which there is no room: the call itself, or less urgent ones, the newest first."""
        victims: list[Call] = []
        candidates: list[Call] | None = None
        while self.num_items >= self._max_items or (self.num_items and self.num_bytes + call.num_bytes > self._max_bytes):
            if candidates is None:
                candidates = [each for *_, each in sorted(self._ready, key=lambda entry: entry[:2]) if not each.is_over and each.priority < call.priority]
            if not candidates:
                return [*victims, call]
            victim = candidates.pop()
            self.over(victim)
            victims.append(victim)
        self._count(call, 1)
        call.serial = next(self._serial)
        heapq.heappush(self._ready, (-call.priority, call.serial, call))
        return victims

    def put_back(self, call: Call, not_before_s: float) -> None:
        """A call that was taken is tried again, not before a time. It had its room and gets it back."""
        self._count(call, 1)
        heapq.heappush(self._later, (not_before_s, call.serial, call))

    def over(self, call: Call) -> None:
        """A waiting call is answered or forgotten."""
        call.is_over = True
        self._count(call, -1)

    def take(self, now_s: float, num_items: int, max_bytes: int) -> list[Call]:
        """At most so many calls, most urgent first; the first one whatever its size."""
        self._wake(now_s)
        batch: list[Call] = []
        num_bytes = 0
        while self._ready and len(batch) < num_items:
            call = self._ready[0][2]
            if not call.is_over:
                if batch and (call.is_alone or num_bytes + call.num_bytes > max_bytes):
                    break
                batch.append(call)
                num_bytes += call.num_bytes
                self._count(call, -1)
            heapq.heappop(self._ready)
            if batch and batch[0].is_alone:
                break
        return batch

    def oldest(self, now_s: float) -> Call | None:
        """The call that would be taken first now."""
        self._wake(now_s)
        while self._ready and self._ready[0][2].is_over:
            heapq.heappop(self._ready)
        return self._ready[0][2] if self._ready else None

    def num_ready(self) -> int:
        """Calls that may be taken now, as of the last look; those over that were not passed by yet are counted in."""
        return len(self._ready)

    def wakes_s(self) -> float | None:
        """When the next call that waits for a time may be taken; None: there is none."""
        while self._later and self._later[0][2].is_over:
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else None

    def all(self) -> list[Call]:
        """Every call that is not over."""
        return [call for *_, call in (*self._ready, *self._later) if not call.is_over]

    def _wake(self, now_s: float) -> None:
        while self._later and (self._later[0][0] <= now_s or self._later[0][2].is_over):
            call = heapq.heappop(self._later)[2]
            if not call.is_over:
                heapq.heappush(self._ready, (-call.priority, call.serial, call))

    def _count(self, call: Call, sign: int) -> None:
        self.num_items += sign
        self.num_bytes += sign * call.num_bytes
