"""The learner's side of trackers: starts one process for each, never waits for one, ends them last."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path

from learner.children import Child
from learner.trackers.following import Place

_LOG = logging.getLogger("headrace.learner.trackers")
END_S = 8.0  # for the last lines; the gateway is ended meanwhile
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check(names: tuple[str, ...]) -> None:
    """Raises ValueError naming what is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ValueError(f"trackers.{name} is set and {PACKAGES[name]} is not installed: install headrace[{name}], or leave trackers.{name} out")


class Trackers:
    """Example: `trackers = Trackers(("wandb",), resolved, run_dir / "logs"); await trackers.start(); ...; await trackers.end()`"""

    def __init__(self, names: tuple[str, ...], resolved: Path, logs: Path) -> None:
        self._children = [Child(f"tracker-{name}", ["learner.trackers", "--config", str(resolved), "--tracker", name], logs / f"tracker-{name}.log") for name in names]
        self._waits: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for child in self._children:
            await child.start()
            self._waits.append(asyncio.create_task(self._tell(child)))

    async def end(self) -> None:
        """Gives them a while for the lines that are left."""
        await asyncio.gather(*(child.end(END_S) for child in self._children if child.started))
        await asyncio.gather(*self._waits)

    async def _tell(self, child: Child) -> None:
        code = await child.wait()
        if code:
            _LOG.warning("%s ended with %d: %s", child.name, code, child.complaint())


def count(run_dir: Path, names: tuple[str, ...]) -> dict[str, float | None]:
    """Trackers by state, for the figures."""
    dropped = sum(bool(Place.read(run_dir / "trackers" / f"{name}.json").dropped) for name in names)
    return {"following": len(names) - dropped, "dropped": dropped}
