"""How many replicas a run should have: a pure function of what its last steps say. Every launcher asks it.

A replica more helps where the learner waits and the replicas do not: the queue of complete groups is short, and each engine is full. It does not help
where replicas idle as well (a slow reward server, a staleness bound that holds them back), so it is not started then.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.cluster.config import Scale
from deploy.fleet import Fleet
from deploy.processes import name_of, rollout
from deploy.progress import follow
from deploy.schema import RunFile


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
    if running < scale.least:
        return 1
    told = [load for load in loads if load.replicas == running][-scale.steps :]
    if len(told) < scale.steps:
        return 0
    starved = all(load.learner_idle >= scale.learner_idle and load.waiting_groups < groups_per_step and load.replicas_idle < scale.replicas_idle for load in told)
    if starved and running < scale.most:
        return 1
    spare = all(load.learner_idle < scale.learner_idle and load.replicas_idle >= scale.replicas_idle for load in told)
    return -1 if spare and running > scale.least else 0


async def keep_scaled(run: RunFile, fleet: Fleet, on_event: Callable[[str], None]) -> None:
    """Starts and stops replicas as `rollout.scale` says, for ever; returns at once where it says nothing.

    One that left by itself (it was asked to) is not missed, as long as `least` are there.
    """
    scale, keeper = run.rollout.scale, fleet.keeper()
    if scale is None:
        return
    there, loads = set(range(run.rollout.replicas)), deque[Load](maxlen=scale.steps)
    async for metrics in follow(run.run_dir / "metrics.jsonl"):
        if "evaluation" in metrics or metrics["step"] >= run.learner.steps:
            continue
        there -= {index for index in there if name_of("rollout", index) in keeper.left}
        loads.append(Load.of(metrics))
        step = change(scale, tuple(loads), groups_per_step=run.learner.groups_per_step, running=len(there))
        if not step:
            continue
        index = next(index for index in itertools.count() if index not in there) if step > 0 else max(there)
        idle = f"learner idle {loads[-1].learner_idle:.0%}, replicas idle {loads[-1].replicas_idle:.0%}, {loads[-1].waiting_groups} groups waiting in each of {scale.steps} steps or more"
        why = idle if len(there) >= scale.least else f"{len(there)} are there, rollout.scale.least={scale.least}"
        if step > 0:
            on_event(f"{name_of('rollout', index)} is started: {why}")
            fleet.start(rollout(run, index))
            there.add(index)
        else:
            on_event(f"{name_of('rollout', index)} is stopped: {why}")
            await fleet.stop(name_of("rollout", index))
            there.remove(index)
        loads.clear()
