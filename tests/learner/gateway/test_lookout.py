"""The gateway looks at itself: alarms, the diagnosis that they begin, and what others are told of both."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from learner.alarm_config import AlarmConfig
from learner.gateway.gateway import Gateway
from learner.gateway.lookout import Bulletin, Lookout
from protos import stacks
from protos.exporting import Figure
from protos.gpus import Gpus
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway.gateway_harness import Actor, config_in, running

QUICK = {"every_s": 0.05, "patience": 0.001, "stalled_s": 0.4, "diagnose_every_s": 600}


async def until(what: Callable[[], Any]) -> Any:
    async with asyncio.timeout(20):
        while not (found := what()):
            await asyncio.sleep(0.02)
    return found


def address(gateway: Gateway) -> str:
    return f"127.0.0.1:{gateway.port}"


async def told(actor: Actor) -> learner_pb2.GetStatusResponse:
    return await actor.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=10)


async def beats(actor: Actor, **load: Any) -> None:
    while True:
        await actor.beat(1, **load)
        await asyncio.sleep(0.05)


async def test_a_replica_that_draws_nothing_is_found_and_named_and_then_it_is_over(tmp_path: Path) -> None:
    config = config_in(tmp_path, alarms=QUICK)
    async with running(config) as gateway:
        stuck, well = Actor(address(gateway), config, "stuck"), Actor(address(gateway), config, "well")
        for actor in (stuck, well):
            await actor.attend(beating=False)
        beating = [asyncio.create_task(beats(stuck, num_running=3, num_drawn=50)), asyncio.create_task(beats(well, num_running=0))]
        order = await stuck.order("diagnose")  # it is asked what its processes do, and answers as from another machine
        answer = learner_pb2.Diagnosis(number=order.number, machine="elsewhere", processes=[learner_pb2.Diagnosis.Process(name="-m rollout_server", pid=7, text="state S\nin a far kernel\n")])
        await stuck.write(learner_pb2.AttendRequest(diagnosis=answer))
        folder = await until(lambda: next((config.run_dir / "diagnosis").glob("[0-9]*HeadraceReplicaStalled*"), None))
        status = await told(stuck)
        while not status.diagnosis_dir:  # the folder is there a moment before it is told of
            await asyncio.sleep(0.02)
            status = await told(stuck)
        assert [(alarm.name, alarm.severity) for alarm in status.alarms] == [("HeadraceReplicaStalled", "critical")] and "replica stuck" in status.alarms[0].words
        assert status.diagnosis_dir == str(folder) and status.verdict.startswith("stalled replica stuck: it has 3 requests")
        assert (folder / "verdict.txt").read_text().startswith("Verdict: stalled replica stuck")
        texts = {file.name: file.read_text() for file in (folder / "stacks").iterdir()}
        assert any("in a far kernel" in text for text in texts.values())
        assert any(str(os.getpid()) in name for name in texts)  # the gateway's own process
        assert "well: rollout server" in (folder / "verdict.txt").read_text()  # asked as well, and it did not answer
        beating[0].cancel()
        beating.append(asyncio.create_task(beats(stuck, num_running=3, num_drawn=51)))
        await until(lambda: len((config.run_dir / "alarms.jsonl").read_text().splitlines()) == 2)
        first, second = map(json.loads, (config.run_dir / "alarms.jsonl").read_text().splitlines())
        assert (first["alarm"], first["fires"], second["fires"], first["labels"]) == ("HeadraceReplicaStalled", True, False, {"replica": "stuck"})
        for task in beating:
            task.cancel()
        await asyncio.gather(stuck.leave(), well.leave())


async def test_a_replica_that_was_lost_is_told_of_and_one_that_said_goodbye_is_not(tmp_path: Path) -> None:
    config = config_in(tmp_path, alarms={**QUICK, "diagnose": False})
    async with running(config) as gateway:
        lost, left = Actor(address(gateway), config, "lost"), Actor(address(gateway), config, "left")
        for actor in (lost, left):
            await actor.attend()
        await left.write(learner_pb2.AttendRequest(goodbye=learner_pb2.Goodbye()))
        await lost.leave()
        asks = Actor(address(gateway), config, "asks")
        async with asyncio.timeout(20):
            while not (alarms := (await told(asks)).alarms):
                await asyncio.sleep(0.05)
        assert [alarm.words for alarm in alarms if "replica left" in alarm.words] == [] and any("replica lost" in alarm.words for alarm in alarms)
        assert not (config.run_dir / "diagnosis").exists()
        await asyncio.gather(left.leave(), asks.leave())


async def test_an_alarm_begins_one_diagnosis_in_its_time_and_a_failed_one_is_counted(tmp_path: Path, monkeypatch: Any) -> None:
    value, figures = [0.0], list(a_figure_of(lambda: value[0]))
    monkeypatch.setattr("learner.gateway.lookout.stacks.ask", lambda pids: [])
    lookout = a_lookout(tmp_path, figures, AlarmConfig(patience=0.001, every_s=1, diagnose_every_s=100, stalled_s=5))
    for now_s, age_s in ((1, 0), (2, 9), (3, 9), (4, 0), (5, 9), (60, 9), (102, 9)):
        value[0] = age_s
        lookout.look(float(now_s))
        if lookout._running is not None:
            await lookout._running
    assert lookout.bulletin.num_diagnoses == 2 and len(list((tmp_path / "diagnosis").iterdir())) == 2  # at 2 and 102
    monkeypatch.setattr("learner.gateway.lookout.stacks.ask", lambda pids: 1 / 0)
    lookout.look(203.0)
    assert lookout._running is not None
    await lookout._running
    assert (lookout.bulletin.num_diagnoses, lookout.bulletin.num_failed_diagnoses) == (2, 1)


def a_figure_of(read: Callable[[], float]) -> Any:
    """Every figure that the lookout asks for; only one of them has a value."""
    from learner.gateway.metrics import FIGURES

    for figure in FIGURES:
        stalled = figure.name == "headrace_gateway_replica_stalled_seconds"
        yield Figure(name=figure.name, kind=figure.kind, text=figure.text, labels=figure.labels, read=(lambda _: {"a": read()}) if stalled else (lambda _: {}))


def a_lookout(run_dir: Path, figures: Any, config: AlarmConfig) -> Lookout[None]:
    class Nobody:
        diagnosed: list[Any] = []  # noqa: RUF012

        def attending(self) -> list[Any]:
            return []

        def broadcast(self, order: Any) -> None:
            pass

    return Lookout(config, figures, None, run_dir=run_dir, attendance=Nobody(), gpus=Gpus(nvml=None, visible=""), bulletin=Bulletin())  # type: ignore[arg-type]


def test_the_machine_has_a_name_that_its_processes_share() -> None:
    assert stacks.machine() == stacks.machine() and "pid:[" in stacks.machine()
