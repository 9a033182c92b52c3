"""What a launch says while a run goes on: steps and alarms as they are written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deploy.launch import tell_steps
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
