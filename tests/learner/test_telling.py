"""What a learner says while it runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest

from learner.config import LearnerConfig
from learner.telling import tell, words
from tests.learner.gateway.gateway_harness import eventually

STEP = {"step": 3, "version": 4, "reward_mean": 0.25, "seconds": {"total": 12.34}}


def test_a_step_is_a_line_and_an_evaluation_is_none() -> None:
    assert words(json.dumps(STEP).encode(), 20) == "step 3 of 20: reward 0.250, version 4, 12.3 s"
    assert words(json.dumps({"step": 3, "evaluation": {}}).encode(), 20) == ""


async def test_this_life_s_address_and_steps_are_told_and_an_earlier_one_s_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.learner")
    config = LearnerConfig.model_validate({"run_dir": tmp_path, "model": "m", "steps": 9, "data": {"prompts": "p"}})
    address, metrics = tmp_path / "gateway.address", tmp_path / "metrics.jsonl"
    address.write_text("127.0.0.1:1")
    os.utime(address, (1, 1))
    metrics.write_text(json.dumps(STEP) + "\n")
    telling = asyncio.create_task(tell(config))
    await asyncio.sleep(0.7)
    assert not caplog.messages
    address.write_text("127.0.0.1:2")
    with metrics.open("a") as file:
        file.write(json.dumps({**STEP, "step": 4}) + "\n" + '{"step": 5')  # a line that is not whole yet
    await eventually(lambda: len(caplog.messages) == 2)
    assert caplog.messages[0].startswith("serves on 127.0.0.1:2; logs in ") and caplog.messages[1] == "step 4 of 9: reward 0.250, version 4, 12.3 s"
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
