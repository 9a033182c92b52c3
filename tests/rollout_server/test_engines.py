"""Several engines of one server: who draws what, and that an update is in all of them or in none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from protos.arrays import pack_ids
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.config import RolloutConfig
from rollout_server.engine import Engine
from rollout_server.engines import Engines
from rollout_server.small_engine import SmallEngine
from rollout_server.weights.driver import CommitError, CommitTimes
from tests.rollout_server import reference
from tests.rollout_server.conftest import Running, Start
from tests.rollout_server.reference import Sample
from tests.rollout_server.test_under_load import Stream
from tests.system.soak.clients import whole


async def two(start: Start, model: Path, *, step_s: float = 0.0, num_seqs: int = 4) -> tuple[Running, list[SmallEngine]]:
    """A server of two small engines."""
    config = RolloutConfig(model=str(model), engine="small", max_model_len=256, max_num_seqs=num_seqs, engines=2)
    each = [SmallEngine(config, model, step_s=step_s) for _ in range(2)]
    running = await start(engine=cast(SmallEngine, Engines(each, num_seqs=num_seqs, num_workers=1)), max_num_seqs=num_seqs, engines=2)
    return running, each


async def test_different_prompts_spread_and_samples_of_one_stay_together_while_there_is_a_place(start: Start, tiny_model: Path) -> None:
    running, each = await two(start, tiny_model, step_s=0.02)
    sampling: Any = {"temperature": 1.0, "max_new_tokens": 100}
    engine = running.service.replica.engine
    spread = [Sample(engine, [65, 66 + i], f"s{i}", seed=i, **sampling) for i in range(4)]
    await asyncio.gather(*(sample.drawn(1) for sample in spread))
    assert [e.stats().num_running for e in each] == [2, 2]
    # Places of each are 4: the first two samples of one prompt go where the first went, the others find no place there.
    together = [Sample(engine, [90], f"t{i}", seed=i, **sampling) for i in range(4)]
    await asyncio.gather(*(sample.drawn(1) for sample in together))
    assert [e.stats().num_running for e in each] == [4, 4] and running.service.replica.engine.stats().num_running == 8
    assert len({id(e) for e in each if any(request.tokens[0] == 90 for request in e._requests)}) == 2
    for sample in spread + together:
        sample.task.cancel()
    await asyncio.gather(*(sample.task for sample in spread + together), return_exceptions=True)
    group = [Sample(engine, [91], f"g{i}", seed=i, temperature=1.0, max_new_tokens=20) for i in range(4)]
    await asyncio.gather(*(sample.drawn(1) for sample in group))
    assert sorted(sum(request.tokens[0] == 91 for request in e._requests) for e in each) == [0, 4]
    await asyncio.gather(*(sample.task for sample in group))


async def test_an_update_is_in_all_engines_and_requests_know_their_versions(start: Start, tiny_model: Path, other_model: Path) -> None:
    running, each = await two(start, tiny_model, step_s=0.01)
    streams = [Stream(running.stub, max_new_tokens=150, seed=seed) for seed in range(8)]
    async with asyncio.timeout(40):
        while min(stream.num_tokens for stream in streams) < 2:
            await asyncio.sleep(0.01)
    assert [e.stats().num_running for e in each] == [4, 4]
    await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40)
    assert [e.loaded_version for e in each] == [1, 1]
    await asyncio.gather(*(stream.task for stream in streams))
    assert [[span.version for span in stream.last.spans] for stream in streams] == [[0, 1]] * 8
    new = reference.load(other_model)
    for number in range(2):  # one each
        sample = await Sample(each[number], [65, 70], f"n{number}", temperature=1.0, max_new_tokens=12, seed=number).task
        assert reference.largest_difference(sample.logprobs, reference.logprobs(new, [65, 70], sample.ids)) < 1e-4


async def test_a_commit_that_only_some_made_leaves_the_replica_stale_and_the_next_mends_it(start: Start, tiny_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running, each = await two(start, tiny_model)
    commit = each[1].commit

    async def failing(version: int) -> CommitTimes:
        raise ValueError("no room")

    monkeypatch.setattr(each[1], "commit", failing)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE and "engine 1 of 2: ValueError: no room" in (failed.value.details() or "")
    assert running.service.replica.state == pb.REPLICA_STATE_STALE and running.engine.loaded_version == 0
    monkeypatch.setattr(each[1], "commit", commit)
    await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40)
    assert running.service.replica.state == pb.REPLICA_STATE_SERVING
    assert len({e.loaded_version for e in each}) == 1


async def test_what_all_refuse_leaves_the_old_version_serving() -> None:
    class Refusing:
        async def commit(self, version: int) -> CommitTimes:
            raise ValueError("not ready")

    class Breaking:
        async def commit(self, version: int) -> CommitTimes:
            raise CommitError("half of it")

    with pytest.raises(ValueError, match="not ready"):
        await Engines(cast(list[Engine], [Refusing(), Refusing()]), num_seqs=1, num_workers=1).commit(2)
    with pytest.raises(CommitError, match="engine 0 of 2: ValueError: not ready; engine 1 of 2: CommitError: half of it"):
        await Engines(cast(list[Engine], [Refusing(), Breaking()]), num_seqs=1, num_workers=1).commit(2)


async def test_each_engine_s_workers_have_their_own_ranks_in_the_learner_s_group() -> None:
    class Receiving:
        rank = 0

        async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
            self.rank = learner_pb2.GroupSpec.FromString(group).receiver_rank

        async def probe(self, token_ids: Any) -> list[float]:
            return [-1.0, -2.0 - self.rank]

    each = [Receiving() for _ in range(3)]
    engines = Engines(cast(list[Engine], each), num_seqs=1, num_workers=2)
    await engines.receive(learner_pb2.GroupSpec(receiver_rank=5).SerializeToString(), b"", 1.0)
    assert [engine.rank for engine in each] == [5, 7, 9]  # two workers each, the replica's first rank being 5
    with pytest.raises(RuntimeError, match="engines 0 and 1 of 3 differ by 2 nats"):
        await engines.probe([1, 2, 3])


async def test_one_dead_engine_restarts_all(start: Start, tiny_model: Path) -> None:
    running, each = await two(start, tiny_model, step_s=0.01)
    replica = running.service.replica
    streams = [Stream(running.stub, max_new_tokens=200, seed=seed) for seed in range(8)]
    async with asyncio.timeout(40):
        while min(stream.num_tokens for stream in streams) < 1:
            await asyncio.sleep(0.01)
    await each[1].stop()
    ends = await asyncio.wait_for(asyncio.gather(*(stream.task for stream in streams), return_exceptions=True), 60)
    assert [end.code() for end in ends if isinstance(end, grpc.aio.AioRpcError)] == [grpc.StatusCode.UNAVAILABLE] * 8
    async with asyncio.timeout(60):
        while replica.life < 2:
            await asyncio.sleep(0.05)
    request = pb.GenerateRequest(prompt_ids=pack_ids([65]), sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=4, seed=1))
    assert len((await whole(running.stub, request)).ids) == 4


def test_settings_that_the_small_engine_does_not_know_are_refused() -> None:
    with pytest.raises(ValueError, match="engine=small knows no pipeline_parallel=2, quantization=fp8"):
        RolloutConfig(model="m", engine="small", pipeline_parallel=2, quantization="fp8")
    assert RolloutConfig(model="m", tensor_parallel=2, pipeline_parallel=3, engines=4).num_workers == 24
