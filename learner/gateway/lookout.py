"""Looks at the gateway's own figures every few seconds; an alarm that begins to fire begins a diagnosis.

    run        consumes the clock and the figures, produces readings, alarms and diagnoses,   waits for the clock
    _diagnose  consumes one picture of the run, produces a folder,   waits for the processes that it asked and the disk, both bounded

One diagnosis runs at a time, in threads where it blocks; the run does not wait for it. Whatever goes wrong with it costs the diagnosis.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from learner.alarm_config import AlarmConfig
from learner.gateway.attendance import Attendance
from learner.gateway.replicas import Replica
from learner.lines import Lines
from learner.watch import diagnosis
from learner.watch.alarms import ALARMS
from learner.watch.diagnosis import Findings
from learner.watch.firing import Alarms, Fire
from learner.watch.picture import FIGURES, OVER_S, picture_of
from learner.watch.verdict import causes
from learner.watch.window import Reading, Window
from protos import stacks
from protos.exporting import Figure
from protos.gpus import Gpus
from protos.learner.v1alpha1 import learner_pb2 as pb

logger = logging.getLogger("headrace.learner.lookout")
FAR_S = 5.0  # for replicas on other machines to tell of their processes
State = TypeVar("State")


@dataclass(kw_only=True, slots=True)
class Bulletin:
    """What the lookout tells others. Mutable: the lookout owns it."""

    firing: tuple[Fire, ...] = ()
    now_s: float = 0.0  # on the clock of Fire.since_s
    num_diagnoses: int = 0
    num_failed_diagnoses: int = 0
    folder: str = ""  # of the newest diagnosis
    verdict: str = ""  # of the newest diagnosis


class Lookout(Generic[State]):
    """Example: `await Lookout(config.alarms, FIGURES, seen, run_dir=config.run_dir, attendance=attendance, gpus=gpus, bulletin=bulletin).run()`"""

    def __init__(self, config: AlarmConfig, figures: Iterable[Figure[State]], state: State, *, run_dir: Path, attendance: Attendance, gpus: Gpus, bulletin: Bulletin) -> None:
        self._config, self._state, self._run_dir = config, state, run_dir
        self._attendance, self._gpus, self.bulletin = attendance, gpus, bulletin
        self._alarms = Alarms(ALARMS.values(), config)
        self._over_s = OVER_S * config.patience
        horizons_s = self._alarms.horizons_s()
        self._window = Window({**horizons_s, **{name: max(self._over_s + config.every_s, horizons_s.get(name, 0.0)) for name in FIGURES}})
        self._figures = [figure for figure in figures if figure.name in {*horizons_s, *FIGURES}]
        assert {figure.name for figure in self._figures} == {*horizons_s, *FIGURES}, "an alarm asks for a figure that the gateway does not tell"
        self._lines = Lines(run_dir / "alarms.jsonl")
        self._diagnosed_s: dict[str, float] = {}  # when an alarm last began a diagnosis, by name
        self._running: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """For ever."""
        try:
            while True:
                await asyncio.sleep(self._config.every_s)
                self.look(time.monotonic())
        finally:
            if self._running is not None:
                self._running.cancel()

    def look(self, now_s: float) -> None:
        """One reading, and what follows from it."""
        self._window.add(now_s, self._reading())
        began, ended = self._alarms.look(self._window)
        self.bulletin.firing, self.bulletin.now_s = tuple(self._alarms.firing.values()), now_s
        for fire in began:
            logger.warning("ALARM %s: %s", fire.alarm.name, fire.words)
        for fire in ended:
            logger.info("alarm %s is over (%s)", fire.alarm.name, fire.words)
        if began or ended:
            self._lines.append("".join(json.dumps({"time_s": time.time(), "alarm": fire.alarm.name, "fires": fires, "labels": fire.labels, "words": fire.words}) + "\n" for fires, fires_of in ((True, began), (False, ended)) for fire in fires_of))
        self._begin(now_s)

    def _reading(self) -> Reading:
        return {figure.name: {frozenset(labels.items()): value for labels, value in figure.values(self._state)} for figure in self._figures}

    def _begin(self, now_s: float) -> None:
        """A diagnosis for the first alarm that fires and has had none for long enough."""
        if not self._config.diagnose or (self._running is not None and not self._running.done()):
            return
        due = [fire for fire in self.bulletin.firing if now_s - self._diagnosed_s.get(fire.alarm.name, float("-inf")) >= self._config.diagnose_every_s]
        if not due:
            return
        for fire in self.bulletin.firing:  # the picture is of all of them
            self._diagnosed_s[fire.alarm.name] = now_s
        self._running = asyncio.create_task(self._diagnose(due[0], self.bulletin.firing))

    async def _diagnose(self, first: Fire, firing: tuple[Fire, ...]) -> None:
        picture = picture_of(self._window, self._over_s)
        try:
            local = await asyncio.to_thread(lambda: stacks.ask(local_processes(self._run_dir)))
            findings = Findings(
                alarms=tuple(f"{fire.alarm.name}: {fire.words}" for fire in (first, *(fire for fire in firing if fire is not first))),
                causes=causes(picture, self._config), picture=picture, gpus=tuple(self._gpu_rows()),
                processes=(*local, *await self._far({process.pid for process in local})),
            )  # fmt: skip
            folder = await asyncio.to_thread(self._write, first.alarm.name, findings)
        except Exception:  # supervised edge: a diagnosis must not take the run along
            self.bulletin.num_failed_diagnoses += 1
            logger.exception("a diagnosis for %s failed", first.alarm.name)
            return
        self.bulletin.num_diagnoses += 1
        self.bulletin.folder, self.bulletin.verdict = str(folder), findings.verdict
        logger.warning("diagnosis of %s: %s; %s", first.alarm.name, findings.verdict, folder)

    def _write(self, name: str, findings: Findings) -> Path:
        root = self._run_dir / "diagnosis"
        folder = diagnosis.write(root, name, findings, sorted((self._run_dir / "logs").glob("*.log")))
        diagnosis.make_room(root, keep=self._config.diagnoses_kept, max_bytes=self._config.diagnosis_bytes)
        return folder

    async def _far(self, known: set[int]) -> list[stacks.Process]:
        """Processes of replicas that are not among the known ones of this machine: each replica asks its own."""
        number, here = next(self._numbers), stacks.machine()
        waiting = {replica.claim.replica_id for replica in self._attendance.attending()}
        answers: list[tuple[str, pb.Diagnosis]] = []
        all_in = asyncio.Event()

        def take(replica: Replica, answer: pb.Diagnosis) -> None:
            if answer.number == number and replica.claim.replica_id in waiting:
                waiting.discard(replica.claim.replica_id)
                answers.append((replica.claim.replica_id, answer))
                if not waiting:
                    all_in.set()

        self._attendance.diagnosed.append(take)
        try:
            self._attendance.broadcast(pb.AttendResponse(diagnose=pb.DiagnoseOrder(number=number)))
            if waiting:
                async with asyncio.timeout(FAR_S):
                    await all_in.wait()
        except TimeoutError:
            pass  # said below
        finally:
            self._attendance.diagnosed.remove(take)
        found = [stacks.Process(pid=one.pid, name=f"{name}: {one.name}", text=one.text) for name, answer in answers for one in answer.processes if answer.machine != here or one.pid not in known]
        silent = [stacks.Process(pid=0, name=f"{name}: rollout server", text=f"asked over its stream, and it has not answered within {FAR_S:.0f} s\n") for name in sorted(waiting)]
        return [*found, *silent]

    def _gpu_rows(self) -> Iterable[dict[str, Any]]:
        for gpu in self._gpus.now():
            yield {"where": "learner", "index": gpu.index, "uuid": gpu.uuid, "use": gpu.use, "used_bytes": gpu.memory_used_bytes, "size_bytes": gpu.memory_bytes, "power_w": gpu.power_w}
        for replica in self._attendance.attending():
            for seen in replica.gpus:
                yield {"where": replica.claim.replica_id, "index": seen.index, "uuid": seen.uuid, "use": seen.use, "used_bytes": seen.used_bytes, "size_bytes": seen.size_bytes, "power_w": seen.power_w}


def local_processes(run_dir: Path) -> list[int]:
    """Those of this run on this machine: the gateway, the learner above it with all its ranks, and what the run's launcher started."""
    parent = os.getppid()
    ours = stacks.family(parent if "-m learner" in stacks.name_of(parent) else os.getpid())
    return list(dict.fromkeys([*ours, *stacks.processes_of(run_dir)]))
