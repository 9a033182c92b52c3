"""Which samples have or want a place in the engine, and a bell for whoever waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Places:
    """Example: `places.want(("g7", 0)); with places.given(): ...; places.leave(("g7", 0))`"""

    def __init__(self) -> None:
        self._wanted: set[tuple[str, int]] = set()
        self._changed = asyncio.Event()
        self.num_given = 0  # of those that want one, how many are with the engine

    @property
    def num_wanted(self) -> int:
        return len(self._wanted)

    def want(self, sample: tuple[str, int]) -> None:
        self._wanted.add(sample)

    def leave(self, sample: tuple[str, int]) -> None:
        """Its place is free; score and receipt need none."""
        self._wanted.discard(sample)
        self.ring()

    @contextmanager
    def given(self) -> Iterator[None]:
        """One sample is with the engine."""
        self.num_given += 1
        try:
            yield
        finally:
            self.num_given -= 1
            self.ring()

    def ring(self) -> None:
        """Something changed that somebody may wait for."""
        self._changed.set()

    async def wait(self, limit_s: float) -> None:
        """Until the next ring, so long at most."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), limit_s)
        except TimeoutError:
            return
