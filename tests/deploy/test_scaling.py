"""How many replicas a run should have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import scaling
from deploy.cluster.config import Scale
from deploy.processes import Process
from deploy.scaling import Load, change

SCALE = Scale(least=1, most=3, learner_idle=0.3, replicas_idle=0.5, steps=3)
STARVED = Load(learner_idle=0.6, replicas_idle=0.1, waiting_groups=0, replicas=2)
SPARE = Load(learner_idle=0.05, replicas_idle=0.7, waiting_groups=9, replicas=2)


def loads(load: Load, count: int = 3, **changes: Any) -> list[Load]:
    values = {name: getattr(load, name) for name in Load.__slots__}
    return [Load(**{**values, **changes})] * count


@pytest.mark.parametrize(
    ("told", "running", "expected"),
    [
        (loads(STARVED), 2, 1),
        (loads(STARVED), 3, 0),  # three is the most
        (loads(STARVED, 2), 2, 0),  # two steps are not three
        ([*loads(STARVED, 2), SPARE], 2, 0),  # not in a row
        (loads(STARVED, waiting_groups=4), 2, 0),  # a whole batch of 4 groups lies ready
        (loads(STARVED, replicas_idle=0.5), 2, 0),  # replicas idle too: rewards, or the bound; one more would idle as well
        (loads(STARVED, replicas=1), 2, 0),  # the second one still loads its model
        (loads(SPARE), 2, -1),
        (loads(SPARE, replicas=1), 1, 0),  # one is the least
        (loads(SPARE, learner_idle=0.3), 2, 0),  # the learner idles as well: not the replicas' number
        (loads(STARVED, learner_idle=0.3), 2, 1),  # at the bound
        (loads(SPARE, replicas_idle=0.5), 2, -1),
        ([], 2, 0),
    ],
)  # fmt: skip
def test_replicas_follow_idle_time_and_queue(told: list[Load], running: int, expected: int) -> None:
    assert change(SCALE, told, groups_per_step=4, running=running) == expected


async def test_a_replica_is_started_by_load_and_stopped_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three starved steps of two replicas, then three of three that have nothing to do; steps between belong to neither count."""
    monkeypatch.setattr(scaling, "rollout", lambda run, index: Process(name=f"rollout-{index}", role="rollout", config={}, log=tmp_path, wants="", wants_metrics=""))
    run: Any = SimpleNamespace(run_dir=tmp_path, rollout=SimpleNamespace(scale=SCALE, replicas=2), learner=SimpleNamespace(groups_per_step=4))
    done: list[str] = []

    async def stop(name: str) -> None:
        done.append(f"stop {name}")

    keeper: Any = SimpleNamespace(stop=stop)
    task = asyncio.create_task(scaling.keep_scaled(run, keeper, lambda process: done.append(f"start {process.name}"), lambda _: None))
    await asyncio.sleep(0.05)
    lines = [STARVED, STARVED, STARVED, STARVED, *loads(SPARE, replicas=3)]
    keys = {"learner_idle": "trainer_idle_share", "replicas_idle": "replica_idle_share", "waiting_groups": "waiting_groups", "replicas": "num_replicas"}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps({key: getattr(line, name) for name, key in keys.items()}) + "\n")
    async with asyncio.timeout(20):
        while len(done) < 2:
            await asyncio.sleep(0.05)
    task.cancel()
    assert done == ["start rollout-2", "stop rollout-2"]
