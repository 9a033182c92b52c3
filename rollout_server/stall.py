"""A wedged engine is noticed by its tokens: its process lives and answers, and draws nothing."""

from __future__ import annotations


class Stall:
    """Example: `stall.seconds(now_s, num_running=3, num_drawn=120, paused=False)` is the time for which three requests have brought no token."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._num_drawn = -1

    def seconds(self, now_s: float, *, num_running: int, num_drawn: int, paused: bool) -> float:
        """Time since the last sign of life: a token, an engine with nothing to do, an update. num_drawn: tokens of the engine since it started."""
        if not num_running or paused or num_drawn != self._num_drawn or self._since_s is None:
            self._since_s, self._num_drawn = now_s, num_drawn
        return now_s - self._since_s


class Rate:
    """Tokens a second over the last `window_s`. Example: looks at 0 s with 0 and at 10 s with 500 tokens give 50."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._looks: list[tuple[float, int]] = []

    def look(self, now_s: float, num_drawn: int) -> None:
        """A number that fell is that of another life of the engine: looks before it do not count."""
        if self._looks and num_drawn < self._looks[-1][1]:
            self._looks.clear()
        self._looks.append((now_s, num_drawn))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= self._window_s:
            del self._looks[0]

    @property
    def per_s(self) -> float | None:
        """None before the second look."""
        if len(self._looks) < 2:
            return None
        (begin_s, before), (end_s, after) = self._looks[0], self._looks[-1]
        return (after - before) / (end_s - begin_s)
