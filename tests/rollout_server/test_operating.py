"""An engine that dies or hangs is noticed, its clients are told, and nothing is served of a version that was lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.arrays import pack_ids
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2
from protos.weights.folder import Place
from rollout_server.replica import BEHIND_S
from rollout_server.service import LIVE
from tests.rollout_server.conftest import Running, Start
from tests.rollout_server.fakes import FakeLearner, FakeReward
from tests.rollout_server.test_following import publish
from tests.rollout_server.test_under_load import Stream
from tests.system.soak.clients import whole

SERVING = health_pb2.HealthCheckResponse.SERVING


async def until(question: Any, limit_s: float = 40.0) -> None:
    async with asyncio.timeout(limit_s):
        while not question():
            await asyncio.sleep(0.02)


async def healthy(running: Running, service: str = "") -> bool:
    async with rpc.channel(running.service.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    return bool(answer.status == SERVING)


async def until_health_says(running: Running, wanted: bool) -> None:
    async with asyncio.timeout(40):
        while await healthy(running) is not wanted:
            await asyncio.sleep(0.05)


async def words_of_failure(stream: Stream) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await asyncio.wait_for(stream.task, 40)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    return failed.value.details() or ""


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """fault(action): the engine does it at its sixth step, once."""

    def plant(action: str) -> None:
        monkeypatch.setenv("HEADRACE_FAULT", f"engine_step={action}@6")
        monkeypatch.setenv("HEADRACE_FAULT_ONCE", str(tmp_path / "fired"))
        monkeypatch.setattr("protos.faultpoints._passages", {})

    return plant


@pytest.mark.parametrize(("action", "why", "words"), [("hang", "stalled", "stopped while the request ran"), ("raise", "died", "fault planted at engine_step")])
async def test_an_engine_that_hangs_or_dies_is_restarted_and_its_requests_are_told(start: Start, fault: Any, action: str, why: str, words: str) -> None:
    # A hanging engine lives and answers every check; what gives it away is that two requests bring no token for stall_s.
    fault(action)
    running = await start(stall_s=1.0)
    replica = running.service.replica
    streams = [Stream(running.stub, max_new_tokens=100, seed=seed) for seed in range(2)]
    for stream in streams:
        assert words in await words_of_failure(stream)
    assert 0 < max(stream.num_tokens for stream in streams) < 100  # the later of the two may have come at the sixth step
    await until(lambda: replica.life == 2)
    assert replica.tally.engine_ends == {"died": why == "died", "stalled": why == "stalled"} and replica.tally.ends["failed"] == 2
    await until_health_says(running, True)
    again = Stream(running.stub, max_new_tokens=20, seed=5)
    await asyncio.wait_for(again.task, 40)
    assert again.num_tokens == 20


async def test_an_idle_or_slow_engine_is_not_taken_for_a_wedged_one(start: Start) -> None:
    running = await start(stall_s=1.0, step_s=0.6)
    stream = Stream(running.stub, max_new_tokens=5, seed=1)  # three seconds, a token each 0.6 s
    await asyncio.wait_for(stream.task, 40)
    await asyncio.sleep(1.5)
    assert stream.num_tokens == 5 and running.service.replica.life == 1


async def test_a_restarted_replica_is_stale_until_it_has_a_version_again(start: Start, learner: FakeLearner, reward: FakeReward, other_model: Path) -> None:
    # faults.md 12, 120: no base weights under the name of a policy, not even for a moment
    learner.publish(3, other_model)
    running = await start(learner=f"127.0.0.1:{learner.port}", rewards=[f"127.0.0.1:{reward.port}"])
    replica = running.service.replica
    await until(lambda: replica.state == pb.REPLICA_STATE_SERVING)
    await until_health_says(running, True)
    newest, learner._newest = learner._newest, None  # the learner has nothing to give just now
    await running.engine.stop()
    await until(lambda: replica.life == 2)
    assert replica.state == pb.REPLICA_STATE_STALE and not replica.ready
    await until_health_says(running, False)
    refused = Stream(running.stub, max_new_tokens=4, seed=1)
    assert "lost version 3" in await words_of_failure(refused)
    learner._newest = newest
    learner.publish(4, other_model)
    await until(lambda: replica.state == pb.REPLICA_STATE_SERVING)
    assert running.engine.loaded_version == 4
    await until_health_says(running, True)


async def test_a_plain_server_has_its_weights_and_a_higher_version_again_after_a_death(start: Start, other_model: Path) -> None:
    # faults.md 35: versions never fall, though the engine that counted them is gone
    running = await start()
    replica = running.service.replica
    for _ in range(2):
        await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40)
    before = Stream(running.stub, max_new_tokens=8, seed=1)
    await before.task
    assert {span.version for span in before.last.spans} == {2}
    await running.engine.stop()
    await until(lambda: replica.life == 2 and replica.state == pb.REPLICA_STATE_SERVING)
    after = Stream(running.stub, max_new_tokens=8, seed=1)
    await after.task
    assert {span.version for span in after.last.spans} == {3}
    assert [response.token_ids for response in after.responses] == [response.token_ids for response in before.responses]


async def test_ready_means_a_current_version_and_live_means_an_engine(start: Start, learner: FakeLearner, reward: FakeReward, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start(learner=f"127.0.0.1:{learner.port}", rewards=[f"127.0.0.1:{reward.port}"])
    replica = running.service.replica
    await until(lambda: bool(learner.hellos) and replica.state == pb.REPLICA_STATE_WAITING)
    await asyncio.sleep(1.2)  # two rounds of health
    assert not await healthy(running) and await healthy(running, LIVE)
    learner.publish(1, tiny_model)
    await until_health_says(running, True)
    assert replica.driver is not None
    # behind the newest for too long: not ready, though it serves; the fetch that would mend it finds nothing
    learner._newest = None
    monkeypatch.setattr(type(replica.driver), "newest_version", property(lambda _: 2))
    replica._current_s = time.monotonic() - BEHIND_S - 1
    assert replica.state == pb.REPLICA_STATE_SERVING and not replica.ready


async def test_a_client_that_never_reads_holds_up_neither_the_engine_nor_a_drain(start: Start) -> None:
    running = await start(max_num_seqs=2)
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(running.service.address, options=options) as narrow:
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=200, seed=1)
        silent = [rollout_pb2_grpc.RolloutServiceStub(narrow).Generate(pb.GenerateRequest(prompt_ids=pack_ids([65]), sampling=sampling), timeout=60) for _ in range(4)]
        other = Stream(running.stub, max_new_tokens=20, seed=2)
        await asyncio.wait_for(other.task, 40)
        assert other.num_tokens == 20
        began_s = time.monotonic()
        await running.stub.Drain(pb.DrainRequest(grace_s=1.0), timeout=40)
        assert time.monotonic() - began_s < 20
        for call in silent:
            call.cancel()
    await until(lambda: running.service.replica.num_running == 0)


async def test_a_call_whose_deadline_is_over_leaves_the_engine_at_once(start: Start) -> None:
    # faults.md 126, 127: deadline 0.5 s on a generation of minutes, tokens trickling; it ends by the wall clock and its place is free
    running = await start(step_s=0.05)
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=250, seed=1)
    began_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await whole(running.stub, pb.GenerateRequest(prompt_ids=pack_ids([65]), sampling=sampling), timeout_s=0.5)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and time.monotonic() - began_s < 10
    await until(lambda: running.engine.stats().num_running == 0, 10)
    assert running.service.replica.tally.ends["cancelled"] == 1


async def test_refused_and_cancelled_calls_leave_no_count_behind(start: Start) -> None:
    # faults.md 125: one place, three waves of a good call among refused and cancelled ones; one is with the engine at a time, and none afterwards
    running = await start(max_num_seqs=1, step_s=0.01)
    replica, stats = running.service.replica, running.engine.stats
    for wave in range(3):
        good = Stream(running.stub, max_new_tokens=60, seed=wave)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError):
                await whole(running.stub, pb.GenerateRequest(prompt_ids=pack_ids([100_000]), sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=4)))
        await until(lambda stream=good: stream.num_tokens)
        cancelled = Stream(running.stub, max_new_tokens=200, seed=wave)  # waits behind the good one
        await until(lambda: stats().num_running == 2)
        assert stats().num_running <= 2 and len(running.engine._requests) <= 2
        cancelled.task.cancel()
        await asyncio.wait_for(good.task, 40)
        await until(lambda: stats().num_running == 0 and replica.num_running == 0)
    ends = replica.tally.ends
    assert (ends["length"], ends["refused"], ends["cancelled"]) == (3, 9, 3)


async def test_open_streams_keep_no_health_check_waiting(start: Start) -> None:
    # faults.md 124: as many streams as a thread pool would have had threads, and more
    running = await start(step_s=0.05, max_num_seqs=4)
    streams = [Stream(running.stub, max_new_tokens=200, seed=seed) for seed in range(40)]
    await until(lambda: any(stream.num_tokens for stream in streams))
    began_s = time.monotonic()
    assert await healthy(running, LIVE)
    assert time.monotonic() - began_s < 10  # below one second on a machine with nothing else to do
    for stream in streams:
        stream.task.cancel()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
    await until(lambda: running.engine.stats().num_running == 0)


async def test_a_follower_of_a_folder_loads_its_version_again_after_a_death(start: Start, tmp_path: Path, other_model: Path) -> None:
    publish(Place(str(tmp_path / "shared")), other_model, tmp_path / "shm", 5)
    running = await start(weights_folder=str(tmp_path / "shared"), mirror_dir=str(tmp_path / "mirror"))
    replica = running.service.replica
    await until(lambda: running.engine.loaded_version == 5)
    await running.engine.stop()
    await until(lambda: replica.life == 2 and running.engine.loaded_version == 5)
    assert replica.state == pb.REPLICA_STATE_SERVING
