"""A circuit breaker: an upstream that keeps failing gets no calls for a while, then a few probes, then calls again. Pure.

    CLOSED ── failures in a row, or their share ──▶ OPEN ── open_s passed ──▶ HALF_OPEN ── probes succeed ──▶ CLOSED
                                                     ▲ twice as long each time ── a probe fails ──┘
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

LONGEST_OPEN_S = 60.0


class State(Enum):
    """Of a breaker; its value is the word for people."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerRule:
    """When to open and for how long.

    Example: `BreakerRule(failures=5, share=0.5, window=40, open_s=2.0, probes=2)`
    """

    failures: int = 5  # in a row
    share: float = 0.5  # of the last `window` results, once there are so many
    window: int = 40
    open_s: float = 2.0  # the first time; doubled for each probe that fails, up to 60 s
    probes: int = 2  # that must succeed one after another; no more are under way at once


@dataclass(kw_only=True, slots=True)
class Breaker:
    """Told of each result; asked before each call. Times are seconds of any one clock."""

    rule: BreakerRule
    num_opened: int = 0  # since the beginning
    _is_open: bool = False  # open or half open
    _until_s: float = 0.0  # while open: when probes may go
    _open_s: float = 0.0  # how long it was opened for
    _in_a_row: int = 0
    _results: deque[bool] = field(default_factory=deque)  # newest last; True: success
    _num_probing: int = 0
    _num_probed: int = 0  # probes that succeeded one after another

    def state(self, now_s: float) -> State:
        if not self._is_open:
            return State.CLOSED
        return State.OPEN if now_s < self._until_s else State.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a call may begin now."""
        state = self.state(now_s)
        return state is State.CLOSED or (state is State.HALF_OPEN and self._num_probing < self.rule.probes)

    def opens_again_s(self, now_s: float) -> float:
        """When calls may go again at the earliest, on the same clock: now unless it is open."""
        return self._until_s if self.state(now_s) is State.OPEN else now_s

    def begin(self, now_s: float) -> bool:
        """Notes a call that begins. Returns whether it is a probe; its end is told with the same word."""
        is_probe = self.state(now_s) is State.HALF_OPEN
        self._num_probing += is_probe
        return is_probe

    def success(self, *, is_probe: bool) -> None:
        self._num_probing -= is_probe
        self._in_a_row = 0
        self._note(True)
        if is_probe and self._is_open:
            self._num_probed += 1
            if self._num_probed >= self.rule.probes:
                self._is_open, self._open_s = False, 0.0
                self._results.clear()

    def failure(self, now_s: float, *, is_probe: bool) -> None:
        self._num_probing -= is_probe
        self._in_a_row += 1
        self._note(False)
        if self._is_open:
            if is_probe and self.state(now_s) is State.HALF_OPEN:
                self._open(now_s)
            return
        full = len(self._results) >= self.rule.window
        if self._in_a_row >= self.rule.failures or (full and self._results.count(False) >= self.rule.share * len(self._results)):
            self._open(now_s)

    def abandoned(self, *, is_probe: bool) -> None:
        """A call that was cancelled, or whose failure says nothing of the upstream's health."""
        self._num_probing -= is_probe

    def _open(self, now_s: float) -> None:
        self._is_open = True
        self._open_s = min(LONGEST_OPEN_S, max(self.rule.open_s, 2 * self._open_s))
        self._until_s = now_s + self._open_s
        self._num_probed = 0
        self.num_opened += 1

    def _note(self, good: bool) -> None:
        self._results.append(good)
        if len(self._results) > self.rule.window:
            self._results.popleft()
