"""What a launch says while a run goes on: steps and alarms as they are written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.telling import Silence, lost, tell_steps
from protos.learner.v1alpha1 import learner_pb2
from tests.learner.gateway.gateway_harness import eventually


async def test_an_alarm_is_told_when_it_fires_and_when_it_is_over(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(run_dir=tmp_path, learner=SimpleNamespace(steps=3))
    told: list[str] = []
    telling = asyncio.create_task(tell_steps(run, told.append))
    await asyncio.sleep(0.05)
    alarm = {"alarm": "HeadraceRewardErrors", "labels": {}, "words": "100.0% of the samples get no score", "time_s": 1.0}
    (tmp_path / "alarms.jsonl").write_text("".join(json.dumps({**alarm, "fires": fires}) + "\n" for fires in (True, False)))
    await eventually(lambda: len(told) == 2)
    assert told == ["alarm HeadraceRewardErrors: 100.0% of the samples get no score", "alarm HeadraceRewardErrors is over: 100.0% of the samples get no score"]
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)


def test_what_was_lost_is_said_by_kind_and_reason_and_nothing_is_said_of_nothing() -> None:
    assert lost({}, {}) == ""
    assert lost({"zero_signal": 20, "unusable": 6}, {"environment_error": 106}) == "26 groups dropped (unusable 6, zero_signal 20), 106 samples unusable (environment_error 106)"


async def test_a_run_that_only_drops_says_so_once_for_each_new_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = learner_pb2.GetStatusResponse(num_dropped={"zero_signal": 3})
    asked: list[str] = []

    async def fetch(address: str, _: object) -> learner_pb2.GetStatusResponse:
        asked.append(address)
        return status

    monkeypatch.setattr("deploy.telling.fetch", fetch)
    (tmp_path / "gateway.address").write_text("127.0.0.1:7")
    run: Any = SimpleNamespace(run_dir=tmp_path)
    told: list[str] = []
    telling = asyncio.create_task(Silence(run, told.append, silence_s=0.05).tell())
    await eventually(lambda: len(asked) >= 3)
    assert asked[0] == "127.0.0.1:7" and len(told) == 1 and told[0].endswith(f"so far 3 groups dropped (zero_signal 3); the logs in {tmp_path}/logs say more")
    status.num_dropped["zero_signal"] = 4
    await eventually(lambda: len(told) == 2)
    status.replicas.add(replica_id="rollout-0", detail="quarantined: its snapshot is gone")
    await eventually(lambda: len(told) == 3)
    assert "4 groups dropped (zero_signal 4), rollout-0: quarantined: its snapshot is gone;" in told[2]
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
