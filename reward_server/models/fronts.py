"""The fronts of this process: one for each model as configured, started once."""

from __future__ import annotations

from reward_server.models.front import Front
from reward_server.models.spec import ModelSpec


class _Fronts:
    def __init__(self) -> None:
        self._started: dict[ModelSpec, Front] = {}

    def of(self, spec: ModelSpec, batch_limit_s: float) -> Front:
        """Blocks at the first call until the model is loaded. Raises ValueError in one line when it cannot be."""
        front = self._started.get(spec)
        if front is None:
            front = Front(spec, batch_limit_s=batch_limit_s)
            front.start()
            self._started[spec] = front
        return front

    async def stop(self) -> None:
        """Ends all; the next call starts anew."""
        for front in self._started.values():
            await front.stop()
        self._started.clear()


fronts = _Fronts()
