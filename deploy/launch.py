"""`headrace launch --backend local`: every service of a run on this machine, until the learner has finished."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deploy.keeper import Outcome
from deploy.local import Local
from deploy.progress import follow, words
from deploy.schema import RunFile
from deploy.scraping import write_scraping
from deploy.services import local_services
from learner.supervisor import claimed


def launch_local(run: RunFile, *, on_event: Callable[[str], None]) -> Outcome:
    """Runs to the end, with a line to `on_event` for each event and step. The run folder says the rest.

    Raises ValueError for a run folder that cannot be made or is in use.
    """
    return asyncio.run(_launch(run, on_event))


async def _launch(run: RunFile, on_event: Callable[[str], None]) -> Outcome:
    with claimed(run.run_dir, "launcher"):
        return await _run(run, on_event)


async def _run(run: RunFile, on_event: Callable[[str], None]) -> Outcome:
    async with Local(on_event=on_event) as local:
        services = local_services(run)
        if (scraping := write_scraping(run, services)) is not None:
            on_event(f"figures: prometheus --config.file={scraping}")
        for service in services:
            local.start(service)
        steps = asyncio.create_task(tell_steps(run, on_event))
        try:
            return await local.outcome()
        finally:
            steps.cancel()


async def tell_steps(run: RunFile, on_event: Callable[[str], None]) -> None:
    """A line for each step that is added to metrics.jsonl from now on; ends only when cancelled."""
    async for metrics in follow(run.run_dir / "metrics.jsonl"):
        on_event(words(metrics, run.learner.steps))
