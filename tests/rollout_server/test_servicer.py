"""RolloutService over loopback, without a learner, spoken to by a plain gRPC client."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.config import RolloutConfig
from rollout_server.small_engine import SmallEngine
from rollout_server.tokens import Tokens
from tests.rollout_server import reference
from tests.rollout_server.conftest import Start

PROMPT = [65, 66, 67]


def a_request(prompt_ids: list[int] = PROMPT, **sampling: Any) -> pb.GenerateRequest:
    values = {"temperature": 1.0, "max_new_tokens": 10, "seed": 4} | sampling
    return pb.GenerateRequest(prompt_ids=pack_ids(prompt_ids), sampling=trajectory_pb2.SamplingParams(**values))


def ids_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [int(token) for response in responses for token in unpack(response.token_ids)]


async def answers(stub: Any, request: pb.GenerateRequest, timeout_s: float = 20.0) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=timeout_s)]


async def test_tokens_stream_out_with_logprobs_spans_and_the_parameters_in_force(start: Start, tiny_model: Path) -> None:
    running = await start()
    responses = await answers(running.stub, a_request(stop_token_ids=[258]))
    ids, logprobs = ids_of(responses), [float(x) for r in responses for x in unpack(r.logprobs)]
    assert len(responses) == len(ids) == len(logprobs) == 10
    assert reference.largest_difference(logprobs, reference.logprobs(reference.load(tiny_model), PROMPT, ids)) < 1e-4
    assert responses[0].effective_sampling == trajectory_pb2.SamplingParams(temperature=1, top_p=1, max_new_tokens=10, stop_token_ids=[258], seed=4)
    assert list(unpack(responses[0].prompt_ids)) == PROMPT
    assert responses[-1].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    assert [(s.version, s.start, s.end) for s in responses[-1].spans] == [(0, 0, 10)]
    assert not any(r.finish_reason or r.spans or r.text for r in responses[:-1])


async def test_the_same_seed_draws_the_same_and_another_seed_does_not(start: Start) -> None:
    running = await start()
    first, again, other = [ids_of(await answers(running.stub, a_request(seed=seed))) for seed in (1, 1, 2)]
    assert first == again != other


async def test_text_and_chat_are_prompts_too_and_detokenize_gives_the_text_so_far(start: Start, tiny_model: Path) -> None:
    running, tokens = await start(), Tokens(tiny_model)
    sampling = trajectory_pb2.SamplingParams(temperature=0, max_new_tokens=4)
    chat = pb.ChatPrompt(messages=[pb.ChatPrompt.Message(role="user", content="hi")])
    for request, prompt_ids in (
        (pb.GenerateRequest(text="abc", sampling=sampling, detokenize=True), tokens.encode("abc")),
        (pb.GenerateRequest(chat=chat, sampling=sampling, detokenize=True), tokens.chat([("user", "hi")])),
    ):
        responses = await answers(running.stub, request)
        assert list(unpack(responses[0].prompt_ids)) == prompt_ids
        assert responses[-1].text == tokens.text(ids_of(responses))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (a_request([]), "empty"),
        (a_request([1] * 256), "max_model_len=256"),
        (a_request([259]), r"\[0, 259\)"),
        (a_request(temperature=-1.0), "temperature=-1"),
        (a_request(temperature=0.001), "clamp in silence"),
        (a_request(max_new_tokens=0), "max_new_tokens=0"),
        (a_request(top_p=1.5), "top_p=1.5"),
        (a_request(top_k=-2), "top_k=-2"),
        (pb.GenerateRequest(), "no prompt"),
        (pb.GenerateRequest(prompt_ids=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_FLOAT32, data=b"1234")), "packed int32"),
    ],
)
async def test_a_users_mistake_is_invalid_argument_with_rule_and_value(start: Start, request_: pb.GenerateRequest, words: str) -> None:
    running = await start()
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await answers(running.stub, request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prompt_one_short_of_the_limit_gets_one_token(start: Start) -> None:
    # faults.md 75
    running = await start()
    responses = await answers(running.stub, a_request([1] * 255))
    assert len(ids_of(responses)) == 1 and responses[0].effective_sampling.max_new_tokens == 1


async def test_a_client_that_gives_up_frees_its_place_long_before_its_tokens_would_be_drawn(start: Start) -> None:
    # faults.md 126
    running = await start(step_s=0.2)  # 50 s in all
    with pytest.raises(grpc.aio.AioRpcError, match="Deadline"):
        await answers(running.stub, a_request(max_new_tokens=250), timeout_s=0.5)
    async with asyncio.timeout(20):
        while running.engine._requests or running.service.replica.num_running:  # the step thread's own list
            await asyncio.sleep(0.01)


async def test_load_weights_is_one_transaction_seen_in_the_spans_of_what_runs(start: Start, tiny_model: Path, other_model: Path) -> None:
    running = await start(step_s=0.005)
    sampled = asyncio.create_task(answers(running.stub, a_request(max_new_tokens=60)))
    await asyncio.sleep(0.15)
    response = await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=20)
    assert response.pause_s > 0
    responses = await sampled
    before, after = responses[-1].spans
    k, ids, logprobs = after.start, ids_of(responses), [float(x) for r in responses for x in unpack(r.logprobs)]
    assert (before.version, before.end, after.version, after.end) == (0, k, 1, 60) and 0 < k < 60
    old, new = [reference.logprobs(reference.load(folder), PROMPT, ids) for folder in (tiny_model, other_model)]
    assert reference.largest_difference(logprobs[:k], old[:k]) < 1e-4
    assert reference.largest_difference(logprobs[k:], new[k:]) < 1e-4
    assert (await running.stub.GetStatus(pb.GetStatusRequest(), timeout=30)).loaded_version == 1


async def test_load_weights_of_another_model_is_refused_and_the_old_weights_serve_on(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    from tests.models import tiny_model_in

    running = await start()
    before = ids_of(await answers(running.stub, a_request()))
    for path, words in ((tiny_model_in(tmp_path, hidden=128), "other shape"), (tmp_path / "nowhere", "no Hugging Face folder")):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
            await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(path)), timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert ids_of(await answers(running.stub, a_request())) == before


async def test_a_failure_after_weights_were_touched_serves_nothing_until_a_full_update(
    start: Start, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start()

    def broken(_: Any) -> None:
        raise OSError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(running.engine, "_apply", broken)
        with pytest.raises(grpc.aio.AioRpcError, match="half way") as caught:
            await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert (await running.stub.GetStatus(pb.GetStatusRequest(), timeout=30)).state == pb.REPLICA_STATE_STALE
    with pytest.raises(grpc.aio.AioRpcError, match="half way") as caught:
        await answers(running.stub, a_request())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    await running.stub.LoadWeights(pb.LoadWeightsRequest(path=str(other_model)), timeout=20)
    assert len(ids_of(await answers(running.stub, a_request()))) == 10


async def test_drain_refuses_the_new_finishes_the_running_and_aborts_what_outlives_the_grace(start: Start) -> None:
    running = await start(step_s=0.01)
    short = asyncio.create_task(answers(running.stub, a_request(max_new_tokens=20)))
    long = asyncio.create_task(answers(running.stub, a_request(max_new_tokens=240)))
    await asyncio.sleep(0.2)
    drained = await running.stub.Drain(pb.DrainRequest(grace_s=0.6), timeout=20)
    assert drained.num_aborted == 1
    assert (await short)[-1].finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    ended = await long
    assert ended[-1].finish_reason == trajectory_pb2.FINISH_REASON_ABORT and 0 < len(ids_of(ended)) < 240
    assert ended[-1].spans[-1].end == len(ids_of(ended))
    with pytest.raises(grpc.aio.AioRpcError, match="draining"):
        await answers(running.stub, a_request())


async def test_health_says_serving_once_the_engine_is_up(start: Start) -> None:
    running = await start()
    async with rpc.channel(running.service.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(30):
            while (await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)).status != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.05)


async def test_the_models_own_generation_config_changes_nothing(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    # faults.md 42: repetition_penalty 1.1, top_k 20, top_p .8 in the model's folder
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    leaky = {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.3, "eos_token_id": list(range(100))}
    (folder / "generation_config.json").write_text(json.dumps(leaky))
    config = RolloutConfig(model=str(folder), engine="small", max_model_len=256)
    plain = await start()
    other = await start(engine=SmallEngine(config, folder))
    here, there = await answers(plain.stub, a_request()), await answers(other.stub, a_request())
    assert ids_of(here) == ids_of(there)
    assert there[0].effective_sampling == trajectory_pb2.SamplingParams(temperature=1, top_p=1, top_k=0, max_new_tokens=10, seed=4)
