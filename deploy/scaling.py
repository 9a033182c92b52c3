"""How many replicas a run should have: a pure function of what its last steps say. Every launcher asks it.

A replica more helps where the learner waits and the replicas do not: the queue of complete groups is short, and each engine is full. It does not help
where replicas idle as well (a slow reward server, a staleness bound that holds them back), so it is not started then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.cluster.config import Scale
from deploy.keeper import Keeper
from deploy.processes import Process, name_of, rollout
from deploy.progress import follow
from deploy.schema import RunFile

Start = Callable[[Process], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one step says. Example: `Load(learner_idle=0.6, replicas_idle=0.1, waiting_groups=0, replicas=2)`"""

    learner_idle: float  # share of the step in which the learner waited for a batch
    replicas_idle: float  # share of it in which a replica had no request, mean over replicas
    waiting_groups: int  # complete ones that no batch has taken yet: the queue
    replicas: int  # attending

    @staticmethod
    def of(metrics: Mapping[str, Any]) -> Load:
        """From a line of metrics.jsonl."""
        return Load(
            learner_idle=float(metrics["trainer_idle_share"]), replicas_idle=float(metrics["replica_idle_share"]),
            waiting_groups=int(metrics["waiting_groups"]), replicas=int(metrics["num_replicas"]),
        )  # fmt: skip


def change(scale: Scale, loads: Sequence[Load], *, groups_per_step: int, running: int) -> int:
    """1: one replica more, -1: one less, 0: neither. loads: of the steps since the last change, oldest first.

    Steps count from where as many replicas attend as were started: one that still loads its model has not helped yet.
    """
    told = [load for load in loads if load.replicas == running][-scale.steps :]
    if len(told) < scale.steps:
        return 0
    starved = all(load.learner_idle >= scale.learner_idle and load.waiting_groups < groups_per_step and load.replicas_idle < scale.replicas_idle for load in told)
    if starved and running < scale.most:
        return 1
    spare = all(load.learner_idle < scale.learner_idle and load.replicas_idle >= scale.replicas_idle for load in told)
    return -1 if spare and running > scale.least else 0


async def keep_scaled(run: RunFile, keeper: Keeper[Any], start: Start, on_event: Callable[[str], None]) -> None:
    """Starts and stops replicas as `rollout.scale` says, for ever; returns at once where it says nothing. start: makes a process run."""
    scale = run.rollout.scale
    if scale is None:
        return
    running, loads = run.rollout.replicas, deque[Load](maxlen=scale.steps)
    async for metrics in follow(run.run_dir / "metrics.jsonl"):
        if "evaluation" in metrics:
            continue
        loads.append(Load.of(metrics))
        step = change(scale, tuple(loads), groups_per_step=run.learner.groups_per_step, running=running)
        if not step:
            continue
        idle = f"learner idle {loads[-1].learner_idle:.0%}, replicas idle {loads[-1].replicas_idle:.0%}, {loads[-1].waiting_groups} groups waiting in each of {scale.steps} steps or more"
        if step > 0:
            on_event(f"{name_of('rollout', running)} is started: {idle}")
            start(rollout(run, running))
        else:
            on_event(f"{name_of('rollout', running - 1)} is stopped: {idle}")
            await keeper.stop(name_of("rollout", running - 1))
        running += step
        loads.clear()


def scaled(run: RunFile, keeper: Keeper[Any], start: Start, on_event: Callable[[str], None]) -> asyncio.Task[None]:
    """keep_scaled as a task."""
    return asyncio.create_task(keep_scaled(run, keeper, start, on_event))
