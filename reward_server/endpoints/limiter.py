"""How many attempts may be under way, how many may begin in a second, and when the other side wants none. Pure.

Rate: a token bucket. Concurrency: a window that halves when the other side says it is overloaded and grows by one for each window
of successes (additive increase, multiplicative decrease: Chiu and Jain 1989, section 3), at most the configured number.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one endpoint, all its upstreams together.

    Example: `Limits(concurrency=64, rate_per_s=10.0, burst=1)`
    """

    concurrency: int = 64
    rate_per_s: float | None = None  # None: as many as come
    burst: int = 1  # attempts that may begin at once after a rest


@dataclass(kw_only=True, slots=True)
class Limiter:
    """Asked before each attempt. Times are seconds of any one clock."""

    limits: Limits
    num_running: int = 0
    num_refused: int = 0  # times the other side said that it was overloaded
    window: float = field(init=False)  # attempts that may be under way
    _tokens: float = field(init=False)
    _filled_s: float | None = None
    _paused_until_s: float = -1.0
    _shrunk_s: float = -1.0

    def __post_init__(self) -> None:
        self.window = float(self.limits.concurrency)
        self._tokens = float(self.limits.burst)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until an attempt may begin; 0: now; None: when one that runs has ended."""
        if self.num_running >= int(self.window):
            return None
        paused_s = max(0.0, self._paused_until_s - now_s)
        if self.limits.rate_per_s is None:
            return paused_s
        self._fill(now_s)
        short = 1.0 - self._tokens
        return max(paused_s, short / self.limits.rate_per_s if short > 1e-9 else 0.0)

    def begin(self, now_s: float) -> None:
        """An attempt begins; `wait_s` was 0."""
        self.num_running += 1
        if self.limits.rate_per_s is not None:
            self._fill(now_s)
            self._tokens -= 1.0

    def end(self, *, is_success: bool) -> None:
        self.num_running -= 1
        if is_success:
            self.window = min(float(self.limits.concurrency), self.window + 1.0 / self.window)

    def refused(self, now_s: float, retry_after_s: float | None) -> None:
        """The other side said that it is overloaded. Refusals of one burst halve the window once."""
        self.num_refused += 1
        if retry_after_s is not None:
            self._paused_until_s = max(self._paused_until_s, now_s + retry_after_s)
        if now_s >= self._shrunk_s:
            self.window = max(1.0, self.window / 2)
            self._shrunk_s = max(self._paused_until_s, now_s + 0.1)

    def _fill(self, now_s: float) -> None:
        assert self.limits.rate_per_s is not None
        if self._filled_s is not None:
            self._tokens = min(float(self.limits.burst), self._tokens + (now_s - self._filled_s) * self.limits.rate_per_s)
        self._filled_s = now_s
