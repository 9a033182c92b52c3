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
        ([], 0, 1),  # fewer than the least
    ],
)  # fmt: skip
def test_replicas_follow_idle_time_and_queue(told: list[Load], running: int, expected: int) -> None:
    assert change(SCALE, told, groups_per_step=4, running=running) == expected


class AFleet:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.left: set[str] = set()

    def keeper(self) -> Any:
        return self  # what it has to say is `left`

    def start(self, process: Process) -> None:
        self.left.discard(process.name)
        self.done.append(f"start {process.name}")

    async def stop(self, name: str) -> None:
        self.done.append(f"stop {name}")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(scaling, "rollout", lambda run, index: Process(name=f"rollout-{index}", role="rollout", config={}, log=tmp_path, wants="", wants_metrics=""))
    return SimpleNamespace(run_dir=tmp_path, rollout=SimpleNamespace(scale=SCALE, replicas=2), learner=SimpleNamespace(groups_per_step=4, steps=100))


def tell(run_dir: Path, lines: list[Load], *, step: int = 1) -> None:
    keys = {"learner_idle": "trainer_idle_share", "replicas_idle": "replica_idle_share", "waiting_groups": "waiting_groups", "replicas": "num_replicas"}
    with (run_dir / "metrics.jsonl").open("a") as file:
        for line in lines:
            file.write(json.dumps({"step": step, **{key: getattr(line, name) for name, key in keys.items()}}) + "\n")


async def asked(fleet: AFleet, count: int) -> list[str]:
    async with asyncio.timeout(20):
        while len(fleet.done) < count:
            await asyncio.sleep(0.05)
    return fleet.done


async def test_a_replica_is_started_by_load_and_stopped_again(run: Any) -> None:
    """Three starved steps of two replicas, then three of three that have nothing to do; steps between belong to neither count."""
    fleet: Any = AFleet()
    task = asyncio.create_task(scaling.keep_scaled(run, fleet, lambda _: None))
    await asyncio.sleep(0)  # it looks at what is there
    tell(run.run_dir, [STARVED, STARVED, STARVED, STARVED, *loads(SPARE, replicas=3)])
    assert await asked(fleet, 2) == ["start rollout-2", "stop rollout-2"]
    task.cancel()


async def test_a_replica_that_was_asked_to_leave_is_not_waited_for_and_its_place_is_filled_by_load(run: Any) -> None:
    """Two replicas, the first is taken away: steps of one count, and it is the first that is started."""
    fleet: Any = AFleet()
    fleet.left.add("rollout-0")
    task = asyncio.create_task(scaling.keep_scaled(run, fleet, lambda _: None))
    await asyncio.sleep(0)
    tell(run.run_dir, loads(STARVED, replicas=1))
    assert await asked(fleet, 1) == ["start rollout-0"]
    task.cancel()


async def test_fewer_than_the_least_are_not_left_so_but_at_the_runs_end(run: Any) -> None:
    fleet: Any = AFleet()
    fleet.left |= {"rollout-0", "rollout-1"}
    task = asyncio.create_task(scaling.keep_scaled(run, fleet, lambda _: None))
    await asyncio.sleep(0)
    tell(run.run_dir, [SPARE], step=100)  # the last step: all leave
    tell(run.run_dir, [SPARE], step=99)
    assert await asked(fleet, 1) == ["start rollout-0"]
    task.cancel()
