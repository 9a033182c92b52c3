"""`headrace launch`: every service of a run until the learner has finished, on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from deploy.backends import check
from deploy.fleet import Fleet, LocalFleet
from deploy.gpus_here import check_gpus
from deploy.keeper import Outcome
from deploy.log_lines import prefixed
from deploy.progress import read_all, surviving
from deploy.scaling import keep_scaled
from deploy.schema import RunFile
from deploy.telling import OnEvent, tell_steps
from learner.supervisor import claimed

Backend = str  # one of backends.THERE


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
        raise ValueError(f"--backend ray: {error.name} is not installed here: pip install \".[ray]\" in the clone, the same release as the cluster's") from None
    return RayFleet.open


def launch(run: RunFile, *, on_event: OnEvent, backend: Backend = "local", with_logs: bool = False) -> Outcome:
    """Runs to the end, with a line to `on_event` for each event and step, and with_logs for each line of the services' logs. The run folder says the rest.

    Raises ValueError for a run folder that cannot be made or is in use, GPUs that this machine lacks, or a cluster that is not there or too small.
    """
    check(run, backend)
    if backend == "local":
        check_gpus(run)
    with claimed(run.run_dir, "launcher"), fleet_of(backend)(run, on_event) as fleet:
        return asyncio.run(_run(run, fleet, on_event, with_logs))


async def _run(run: RunFile, fleet: Fleet, on_event: OnEvent, with_logs: bool) -> Outcome:
    async with _logs_told([run.run_dir / "logs", *(process.log.parent for process in fleet.first)] if with_logs else [], on_event) as logs, fleet.keeper() as keeper:
        fleet.start(*fleet.first)
        beside = [asyncio.create_task(tell_steps(run, on_event)), asyncio.create_task(keep_scaled(run, fleet, on_event))]
        try:
            return await _outcome(keeper, *logs, *beside)
        finally:
            for task in beside:
                task.cancel()


@asynccontextmanager
async def _logs_told(folders: list[Path], on_event: OnEvent) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Lines of the logs while the block runs, and what was written until its end: how services stopped, too."""
    if not folders:
        yield []
        return
    ended = asyncio.Event()
    lines = prefixed(folders, ended=ended)

    async def tell() -> None:
        async for line in lines:
            on_event(line)

    task = asyncio.create_task(tell())
    try:
        yield [task]
    finally:
        ended.set()
        await asyncio.wait({task})


async def _outcome(keeper: Any, *beside: asyncio.Task[None]) -> Outcome:
    """How the run ended. Raises what one of the tasks beside it raised: a run is not left unwatched in silence."""
    ended = asyncio.create_task(keeper.outcome())
    while not ended.done():
        done, _ = await asyncio.wait({ended, *(task for task in beside if not task.done())}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    outcome: Outcome = ended.result()
    return outcome


def last_words(run: RunFile, *, is_mistaken: bool = False) -> str:
    """How far the run came, where it lies, and what to do next. is_mistaken: a user's mistake ended it, which is to be mended first."""
    made = surviving(read_all(run.run_dir / "metrics.jsonl"))
    step = int(made[-1]["step"]) if made else 0
    limit = f" (its limit of {run.learner.max_minutes:g} minutes, or it was stopped)" if run.learner.max_minutes and step < run.learner.steps else ""
    after = f"`headrace report {run.run_dir}`" if made else f"{run.run_dir}/logs says why"
    return f"step {step} of {run.learner.steps}{limit}; run folder {run.run_dir}; next: {after}" + ("" if step >= run.learner.steps else ", then the same command" if is_mistaken else ", the same command goes on")
