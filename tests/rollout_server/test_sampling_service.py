"""What Generate draws from and says about it, over the small engine: seeds, whole completions, flags, padding rows, limits."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.config import RolloutConfig
from rollout_server.small_engine import SmallEngine
from rollout_server.tokens import Tokens
from rollout_server.usable import unusable_reason
from tests.rollout_server.conftest import Start
from tests.rollout_server.test_vllm_sampling import KNOWN, POISON, ROWS, padded

PROMPT = [65, 66, 67]


def a_request(prompt: list[int] = PROMPT, *, whole: bool = False, **sampling: Any) -> pb.GenerateRequest:
    values = {"temperature": 1.0, "max_new_tokens": 12, "seed": 4} | sampling
    return pb.GenerateRequest(prompt_ids=pack_ids(prompt), sampling=trajectory_pb2.SamplingParams(**values), whole=whole)


async def answers(stub: Any, request: pb.GenerateRequest, timeout_s: float = 30.0) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=timeout_s)]


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [int(token) for response in responses for token in unpack(response.token_ids)]


async def test_seeds_left_open_differ_over_replicas_and_requests_and_what_is_told_draws_the_same_again(start: Start) -> None:
    one, two = await start(), await start()
    drawn = [await answers(running.stub, a_request(seed=0)) for running in (one, two) for _ in range(3)]
    seeds = [responses[0].effective_sampling.seed for responses in drawn]
    assert len(set(seeds)) == 6 and 0 not in seeds and len({tuple(ids_of(responses)) for responses in drawn}) == 6
    assert ids_of(await answers(two.stub, a_request(seed=seeds[0]))) == ids_of(drawn[0])


async def test_a_whole_completion_is_one_message_with_what_the_stream_has(start: Start) -> None:
    running = await start()
    (whole,), stream = await answers(running.stub, a_request(whole=True)), await answers(running.stub, a_request())
    assert len(stream) == 12 and list(unpack(whole.token_ids)) == ids_of(stream)
    assert list(unpack(whole.logprobs)) == [float(x) for response in stream for x in unpack(response.logprobs)]
    assert (whole.finish_reason, whole.spans, whole.effective_sampling, whole.prompt_ids) == (stream[-1].finish_reason, stream[-1].spans, stream[0].effective_sampling, stream[0].prompt_ids)


async def test_padding_rows_are_never_drawn_and_nan_is_flagged(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 56 and 47
    model = padded(tiny_model, tmp_path / "padded")
    config = RolloutConfig(model=str(model), engine="small", max_model_len=256)
    running = await start(engine=SmallEngine(config, model))
    drawn = [await answers(running.stub, a_request(seed=seed, max_new_tokens=40)) for seed in range(1, 5)]
    assert all(max(ids_of(responses)) < KNOWN and responses[-1].unusable_reason == "" for responses in drawn)
    poisoned, healthy = await asyncio.gather(answers(running.stub, a_request([POISON, 65])), answers(running.stub, a_request()))
    assert poisoned[-1].unusable_reason == "non_finite_logprob" and healthy[-1].unusable_reason == ""
    assert all(math.isfinite(x) for response in healthy for x in unpack(response.logprobs))


def test_why_a_sample_is_none_to_train_on() -> None:
    assert unusable_reason([1, 2], [-0.5, -1.0], num_known=100) == ""
    assert unusable_reason([1, 110], [-0.5, -1.0], num_known=100) == "token_without_text"  # faults.md 56: vocabulary 100, head 128, id 110
    for bad in (math.nan, -math.inf, math.inf):
        assert unusable_reason([1, 2], [-0.5, bad], num_known=100) == "non_finite_logprob"


def test_ids_without_text_are_the_rows_beyond_the_tokenizer_and_its_holes(tiny_model: Path) -> None:
    tokens = Tokens(tiny_model)
    assert tokens.without_text(KNOWN) == [] and tokens.without_text(ROWS) == list(range(KNOWN, ROWS))


@pytest.mark.parametrize("cut", [{"bad_words": ["a"]}, {"regex": "a+"}, {"json_schema": json.dumps({"type": "object"})}])
async def test_the_small_engine_refuses_by_name_what_it_cannot_cut(start: Start, cut: dict[str, Any]) -> None:
    running = await start()
    with pytest.raises(grpc.aio.AioRpcError, match="engine: small knows no bad_words, regex or json_schema") as caught:
        await answers(running.stub, a_request(**cut))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_status_answer_at_once_beside_many_open_streams(start: Start) -> None:
    # faults.md 124
    running = await start(step_s=0.2, max_num_seqs=4)
    streams = [asyncio.create_task(answers(running.stub, a_request(seed=seed, max_new_tokens=200))) for seed in range(1, 65)]
    async with asyncio.timeout(60):
        while running.engine.stats().num_running < 60:  # four are drawn, the others wait with an open stream each
            await asyncio.sleep(0.02)
    async with rpc.channel(running.service.address) as channel:
        began_s = time.monotonic()
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        await running.stub.GetStatus(pb.GetStatusRequest(), timeout=30)
        assert time.monotonic() - began_s < 30 and not all(stream.done() for stream in streams)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def test_no_more_are_drawn_at_once_than_there_are_places_wave_after_wave(start: Start) -> None:
    # faults.md 125: one place, three waves of four of which each is given up, then one more is drawn
    running = await start(step_s=0.01, max_num_seqs=1)
    for wave in range(3):
        clients = [asyncio.create_task(answers(running.stub, a_request(seed=4 * wave + i + 1, max_new_tokens=200))) for i in range(4)]
        async with asyncio.timeout(60):
            while running.engine.stats().num_running < 4:
                await asyncio.sleep(0.01)
        assert sum(request.num_drawn > 0 for request in running.engine._requests) <= 1
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        async with asyncio.timeout(60):
            while running.engine.stats().num_running:
                await asyncio.sleep(0.01)
    assert len(ids_of(await answers(running.stub, a_request()))) == 12


async def test_a_deadline_is_a_wall_clock_limit_however_steadily_tokens_trickle(start: Start) -> None:
    # faults.md 127: a token every 0.2 s for a minute, a deadline of 1 s
    running = await start(step_s=0.2)
    began_s = time.monotonic()
    got: list[Any] = []

    async def read() -> None:
        async for response in running.stub.Generate(a_request(max_new_tokens=200), timeout=1.0):
            got.extend(unpack(response.token_ids))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED and got
    assert 0.9 <= time.monotonic() - began_s < 20
    async with asyncio.timeout(20):  # faults.md 126
        while running.engine.stats().num_running:
            await asyncio.sleep(0.02)


def test_vllm_s_processes_are_spawned_never_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 123: a fork beside grpc's threads hangs or dies
    import os

    from rollout_server import vllm_setup

    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        vllm_setup.prepare_environment(RolloutConfig(model="m"), on_gpu=True)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


async def test_an_engine_s_version_never_falls(start: Start) -> None:
    # faults.md 35
    running = await start()
    running.engine._loaded_version = 57
    with pytest.raises(ValueError, match="version 1 cannot follow 57: versions never fall"):
        await running.engine.commit(1)


def test_a_row_of_nan_is_a_draw_all_the_same() -> None:
    from rollout_server.engine import SamplingSpec
    from rollout_server.sampling import draw

    token, logprob = draw(torch.full((8,), torch.nan), SamplingSpec(temperature=1.0, max_new_tokens=1), torch.Generator().manual_seed(1))
    assert 0 <= token < 8 and math.isnan(logprob)
