"""How many calls go in one attempt, and how long the first of them waits for company. Pure.

Size: grows by one while a batch's answer comes within `target_s`, and is cut to 0.7 when it does not or when the other side finds a
batch too much. Wait: nothing while nothing is under way (company would only cost time); else until the batch is full, at most `wait_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRule:
    """Example: `BatchRule(most=32, wait_s=0.01, target_s=2.5)`"""

    most: int = 1  # calls in one attempt
    wait_s: float = 0.005
    target_s: float = 2.5


@dataclass(kw_only=True, slots=True)
class Batching:
    """Told how batches fared; asked before each."""

    rule: BatchRule
    _size: float = field(init=False)

    def __post_init__(self) -> None:
        self._size = float(min(self.rule.most, 8))

    @property
    def size(self) -> int:
        """Calls of the next batch at most, 1 to `rule.most`."""
        return max(1, min(self.rule.most, int(self._size)))

    def wait_s(self, now_s: float, *, num_waiting: int, oldest_s: float, num_running: int) -> float:
        """Seconds until the next batch should go; 0: now. oldest_s: when the oldest waiting call came."""
        if num_running == 0 or num_waiting >= self.size:
            return 0.0
        return max(0.0, oldest_s + self.rule.wait_s - now_s)

    def took(self, num_items: int, took_s: float) -> None:
        """A batch was answered. One smaller than allowed says nothing of larger ones, unless it was slow."""
        if took_s > self.rule.target_s:
            self._shrink()
        elif num_items >= self.size:
            self._size = min(float(self.rule.most), self._size + 1.0)

    def too_much(self, num_items: int) -> None:
        """A batch failed that may have been too large."""
        if num_items > 1:
            self._shrink()

    def _shrink(self) -> None:
        self._size = max(1.0, 0.7 * self._size)
