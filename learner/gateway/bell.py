"""Something changed: wakes everybody who waits, at once or not at all."""

from __future__ import annotations

import asyncio


class Bell:
    """Rung by whoever changes a state; waiters check the state again. Check and wait without an await in between.

    Example:
        while not ready():
            if not await bell.wait(limit_s):
                return None
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, limit_s: float | None = None) -> bool:
        """True once rung, False when limit_s (None: no limit) has passed."""
        event = self._event
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
