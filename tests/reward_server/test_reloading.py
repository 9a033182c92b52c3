"""SIGHUP: other scorers, and no call lost on the way."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1.reward_pb2_grpc import RewardServiceStub
from reward_server import wiring
from reward_server.config import RewardConfig
from reward_server.outcome import Scored, Unscored
from reward_server.reloading import Reloading
from tests.reward_server.conftest import FOLDER
from tests.reward_server.endpoints.conftest import plane_of, score
from tests.reward_server.service import serving


def at_work(*scorers: dict[str, Any], plane: Any = None) -> Any:
    return wiring.scorers(RewardConfig.model_validate({"scorers": list(scorers)}), FOLDER, before=plane.at_work if plane else None)


def weighted(weight: float) -> dict[str, Any]:
    return {"name": "a", "use": "user_functions:weighted", "args": {"weight": weight}}


SLOW = {"name": "slow", "use": "user_functions:waits", "limit_s": 20}


async def test_running_calls_end_with_the_old_scorers_and_new_ones_go_to_the_new() -> None:
    async with plane_of(weighted(1.0), SLOW) as plane:
        assert await score(plane, "3") == Scored(value=3.0)
        running = asyncio.ensure_future(score(plane, "1.5", name="slow"))
        await asyncio.sleep(0.1)
        await plane.replace(at_work(weighted(2.0)), default="a")
        assert await score(plane, "3") == Scored(value=6.0)  # not the cached 3: another configuration
        gone = await score(plane, "1", name="slow")
        assert isinstance(gone, Unscored) and "no scorer 'slow'" in gone.detail and not running.done()
        assert await running == Scored(value=1.0)
        until_s = asyncio.get_running_loop().time() + 20
        while plane._leaving:  # the old processes are stopped once they have nothing left
            assert asyncio.get_running_loop().time() < until_s
            await asyncio.sleep(0.05)
        assert plane.tallies["slow"].num_answered == 1 and plane.tallies["a"].num_answered == 2


async def test_scorers_that_cannot_be_loaded_change_nothing() -> None:
    async with plane_of(weighted(1.0)) as plane:
        with pytest.raises(ValueError, match="module 'nowhere' was not found"):
            await plane.replace(at_work({"name": "a", "use": "nowhere:f"}), default="a")
        assert await score(plane, "3") == Scored(value=3.0)


async def test_a_reload_that_the_machine_has_no_room_for_is_told_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def reread() -> RewardConfig:
        raise OSError("Resource temporarily unavailable")

    async with plane_of(weighted(1.0)) as plane:
        reloading = Reloading(plane, RewardConfig.model_validate({"scorers": [weighted(1.0)]}), reread, FOLDER)
        reloading.ask()
        async with asyncio.timeout(60):
            while "the scorers stay as they are: Resource temporarily unavailable" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await score(plane, "3") == Scored(value=3.0)


async def test_an_endpoint_whose_configuration_is_the_same_keeps_its_limits_and_breaker() -> None:
    far, other = ({"name": name, "limit_s": 1, "http": {"urls": ["http://127.0.0.1:9/"]}} for name in ("far", "other"))
    async with plane_of(far, other) as plane:
        before = dict(plane.scorers)
        await plane.replace(at_work(far, {**other, "limit_s": 2}, plane=plane), default="far")
        assert plane.scorers["far"] is before["far"] and plane.scorers["other"] is not before["other"]
        outcome = await score(plane, "1")
        assert isinstance(outcome, Unscored) and outcome.reason == "unavailable"


async def test_a_reload_of_the_file_keeps_endpoints_that_are_the_same_in_it() -> None:
    far = {"name": "far", "limit_s": 1, "http": {"urls": ["http://127.0.0.1:9/"]}}
    async with plane_of(far) as plane:
        before = plane.scorers["far"]
        changed = RewardConfig.model_validate({"scorers": [far, weighted(1.0)]})
        await Reloading(plane, RewardConfig.model_validate({"scorers": [far]}), lambda: changed, FOLDER).reload()
        assert plane.scorers["far"] is before and await score(plane, "3", name="a") == Scored(value=3.0)


def test_a_signal_reloads_the_file_and_a_mistake_in_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(prompt, completion, fields, *, weight):\n    return weight\n")

    def file(**scorer: Any) -> dict[str, Any]:
        return {"scorers": [{"name": "mine", "use": "mine:score", **scorer}]}

    def value(stub: RewardServiceStub) -> float:
        (answer,) = stub.Score(iter([pb.ScoreRequest(id="1")]), timeout=20)
        return float(answer.reward.score.value)

    def becomes(stub: RewardServiceStub, wanted: float) -> None:
        until_s = time.monotonic() + 20
        while value(stub) != wanted:
            assert time.monotonic() < until_s
            time.sleep(0.05)

    with serving(tmp_path, file(args={"weight": 1.0})) as (address, process), grpc.insecure_channel(address) as channel:
        stub = RewardServiceStub(channel)
        assert value(stub) == 1.0
        for content in (file(args={"weight": 2.0}), file(args={"wait": 3.0}), file(args={"weight": 4.0})):
            (tmp_path / "reward.yaml").write_text(yaml.safe_dump(content))
            process.send_signal(signal.SIGHUP)
            becomes(stub, content["scorers"][0]["args"].get("weight", 2.0))
            time.sleep(0.5)  # a second signal while the first is being followed is followed, too, by the newest file
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert "the scorers stay as they are: scorer 'mine'" in errors and "Traceback" not in errors
