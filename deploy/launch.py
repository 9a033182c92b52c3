"""`headrace launch`: every service of a run until the learner has finished, on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from deploy.fleet import Fleet, LocalFleet
from deploy.keeper import Outcome
from deploy.progress import follow, words
from deploy.scaling import keep_scaled
from deploy.schema import RunFile
from learner.supervisor import claimed

Backend = Literal["local", "ray"]
OnEvent = Callable[[str], None]


class Open(Protocol):
    """Connects to what a backend runs on, while a block runs."""

    def __call__(self, run: RunFile, on_event: OnEvent) -> AbstractContextManager[Fleet]: ...


def fleet_of(backend: Backend) -> Open:
    """Ray is imported where it is wanted only. Raises ValueError when it is not installed."""
    if backend == "local":
        return LocalFleet.open
    try:
        from deploy.on_ray.fleet import RayFleet
    except ModuleNotFoundError as error:
        raise ValueError(f"--backend ray: {error.name} is not installed here: pip install 'headrace[ray]', the same release as the cluster's") from None
    return RayFleet.open


def launch(run: RunFile, *, on_event: OnEvent, backend: Backend = "local") -> Outcome:
    """Runs to the end, with a line to `on_event` for each event and step. The run folder says the rest.

    Raises ValueError for a run folder that cannot be made or is in use, or a cluster that is not there or too small.
    """
    with claimed(run.run_dir, "launcher"), fleet_of(backend)(run, on_event) as fleet:
        return asyncio.run(_run(run, fleet, on_event))


async def _run(run: RunFile, fleet: Fleet, on_event: OnEvent) -> Outcome:
    async with fleet.keeper() as keeper:
        fleet.start(*fleet.first)
        beside = (asyncio.create_task(tell_steps(run, on_event)), asyncio.create_task(keep_scaled(run, keeper, fleet.start, on_event)))
        try:
            return await _outcome(keeper, *beside)
        finally:
            for task in beside:
                task.cancel()


async def _outcome(keeper: Any, *beside: asyncio.Task[None]) -> Outcome:
    """How the run ended. Raises what one of the tasks beside it raised: a run is not left unwatched in silence."""
    ended = asyncio.create_task(keeper.outcome())
    while not ended.done():
        done, _ = await asyncio.wait({ended, *(task for task in beside if not task.done())}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    outcome: Outcome = ended.result()
    return outcome


async def tell_steps(run: RunFile, on_event: OnEvent) -> None:
    """A line for each step that is added to metrics.jsonl from now on; ends only when cancelled."""
    async for metrics in follow(run.run_dir / "metrics.jsonl"):
        on_event(words(metrics, run.learner.steps))
