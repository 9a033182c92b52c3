"""The end of a run, seen from a replica: the last version is loaded first, and who stays serves it until another run begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2
from tests.rollout_server.conftest import Running, Start
from tests.rollout_server.fakes import FakeLearner, FakeReward

FINISHED = pb.AttendResponse(run_finished=pb.RunFinished(reason="20 steps"))


class LearnerWithStatus(FakeLearner):
    """Also says whether its run is over."""

    finished = False

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(run_id="run-1", finished=self.finished)


@pytest.fixture
async def run() -> AsyncIterator[LearnerWithStatus]:
    learner = LearnerWithStatus()
    await learner.start()
    yield learner
    await learner.stop()


async def attending(start: Start, run: FakeLearner, reward: FakeReward, **more: Any) -> Running:
    """A replica that serves version 1."""
    running = await start(learner=f"127.0.0.1:{run.port}", rewards=(f"127.0.0.1:{reward.port}",), replica_id="a", **more)
    await run.until(lambda: any(beat.loaded_version == 1 for beat in run.heartbeats))
    return running


async def test_a_version_published_just_before_the_end_is_loaded_before_the_replica_leaves(
    start: Start, run: LearnerWithStatus, reward: FakeReward, tiny_model: Path
) -> None:
    run.publish(1, tiny_model)
    running = await attending(start, run, reward)
    run.publish(2, tiny_model)
    run.order(FINISHED)
    await asyncio.wait_for(running.serving, 20)
    assert any(report.version == 2 and report.phase == pb.UPDATE_PHASE_LOADED for report in run.reports)


async def test_a_replica_that_stays_serves_the_last_weights_until_another_run_begins(
    start: Start, run: LearnerWithStatus, reward: FakeReward, tiny_model: Path
) -> None:
    run.publish(1, tiny_model)
    running = await attending(start, run, reward, exit_when_finished=False)
    run.publish(2, tiny_model)
    run.finished = True
    run.order(FINISHED)
    await run.until(lambda: any(report.version == 2 for report in run.reports))
    await asyncio.sleep(1.5)
    status = await running.stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=30)
    assert (status.state, status.loaded_version) == (rollout_pb2.REPLICA_STATE_SERVING, 2)
    assert (running.service.replica.life, len(run.hellos)) == (1, 1)

    run.finished = False
    await run.until(lambda: len(run.hellos) == 2)
    assert running.service.replica.life == 2
