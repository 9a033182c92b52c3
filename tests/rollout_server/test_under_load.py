"""Many streams at once: an update ends none of them, a drain ends all of them with words, and a learner that hangs holds up neither."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.service import LIVE
from tests.rollout_server.conftest import Running, Start

PROMPT = [65, 66, 67]


class Stream:
    """One client's stream, read as it comes."""

    def __init__(self, stub: Any, *, max_new_tokens: int, seed: int) -> None:
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=seed)
        self.responses: list[pb.GenerateResponse] = []
        self.task = asyncio.create_task(self._read(stub, pb.GenerateRequest(prompt_ids=pack_ids(PROMPT), sampling=sampling)))

    async def _read(self, stub: Any, request: pb.GenerateRequest) -> None:
        async for response in stub.Generate(request, timeout=60):
            self.responses.append(response)

    @property
    def num_tokens(self) -> int:
        return sum(len(unpack(response.token_ids)) for response in self.responses)

    @property
    def last(self) -> pb.GenerateResponse:
        return self.responses[-1]


async def streams(running: Running, num: int, *, max_new_tokens: int, each: int) -> list[Stream]:
    """So many streams, once each has brought `each` tokens."""
    made = [Stream(running.stub, max_new_tokens=max_new_tokens, seed=seed) for seed in range(num)]
    async with asyncio.timeout(40):
        while min(stream.num_tokens for stream in made) < each:
            await asyncio.sleep(0.01)
    return made


async def test_an_update_ends_no_stream_and_all_are_in_flight_again_at_once(start: Start, other_model: Path) -> None:
    # faults.md 31, 98: 32 in flight, 32 right after the update without any completion in between, and each has both versions
    running = await start(max_num_seqs=32)
    made = await streams(running, 32, max_new_tokens=120, each=2)
    assert running.engine.stats().num_running == 32
    await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40)
    ended = [stream for stream in made if stream.task.done()]
    assert running.engine.stats().num_running == 32 - len(ended) and not ended
    await asyncio.gather(*(stream.task for stream in made))
    assert [stream.last.finish_reason for stream in made] == [trajectory_pb2.FINISH_REASON_LENGTH] * 32
    assert [[span.version for span in stream.last.spans] for stream in made] == [[0, 1]] * 32
    assert [stream.num_tokens for stream in made] == [120] * 32


async def test_streams_that_are_aborted_all_hear_of_it_with_what_they_had(start: Start) -> None:
    # faults.md 32: 8 streams, 8 last messages, each with its tokens and the reason
    running = await start(step_s=0.01)
    made = await streams(running, 8, max_new_tokens=240, each=3)
    drained = await running.stub.Drain(pb.DrainRequest(grace_s=0.0), timeout=20)
    await asyncio.wait_for(asyncio.gather(*(stream.task for stream in made)), 20)
    assert drained.num_aborted == 8
    assert [stream.last.finish_reason for stream in made] == [trajectory_pb2.FINISH_REASON_ABORT] * 8
    assert all(3 <= stream.num_tokens < 240 and stream.last.spans[-1].end == stream.num_tokens for stream in made)


async def test_nothing_is_drawn_between_pause_and_resume_however_many_come_meanwhile(start: Start, other_model: Path, monkeypatch: Any) -> None:
    # faults.md 33: 50 submissions race with the pause
    running = await start(max_num_seqs=64)
    engine, held = running.engine, {}
    apply = engine._apply

    def slow(tensors: Any) -> None:
        held["before"] = sum(request.num_drawn for request in engine._requests)
        time.sleep(0.4)
        held["after"] = sum(request.num_drawn for request in engine._requests)
        apply(tensors)

    monkeypatch.setattr(engine, "_apply", slow)
    loading = asyncio.ensure_future(running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=40))
    made = []
    for seed in range(50):
        made.append(Stream(running.stub, max_new_tokens=6, seed=seed))
        await asyncio.sleep(0.005)
    await loading
    await asyncio.gather(*(stream.task for stream in made))
    assert held["before"] == held["after"]
    assert all(stream.num_tokens == 6 and stream.last.spans[-1].end == 6 for stream in made)


async def test_a_learner_that_hangs_holds_up_neither_health_nor_plain_streams(start: Start) -> None:
    # faults.md 99: it takes connections and never says a word
    hung = await asyncio.start_server(lambda reader, writer: asyncio.sleep(3600), "127.0.0.1", 0)
    async with hung:
        running = await start(learner=f"127.0.0.1:{hung.sockets[0].getsockname()[1]}", rewards=["127.0.0.1:1"], step_s=0.01)
        stream = Stream(running.stub, max_new_tokens=100, seed=1)
        waits, seen = [], []
        async with rpc.channel(running.service.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while not stream.task.done():
                asked_s = time.monotonic()
                answer = await health.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=20)
                waits.append(time.monotonic() - asked_s)
                seen.append(stream.num_tokens)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(0.05)
        assert stream.num_tokens == 100 and len(set(seen)) > 5, "tokens came one after another meanwhile"
        assert sorted(waits)[len(waits) // 2] < 5 and max(waits) < 20, waits  # the hung one never answers
