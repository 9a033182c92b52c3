"""What a plain gRPC client may ask of Generate by mistake: each has its status and its words, and the next request is served."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import grpc
import pytest

from protos.arrays import pack_ids
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.rollout_server.conftest import Start

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def generate(prompt: Any = (65, 66), **sampling: Any) -> pb.GenerateRequest:
    parameters = trajectory_pb2.SamplingParams(**{"temperature": 1.0, "max_new_tokens": 3, **sampling})
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, sampling=parameters)
    packed = prompt if isinstance(prompt, trajectory_pb2.PackedArray) else pack_ids(prompt)
    return pb.GenerateRequest(prompt_ids=packed, sampling=parameters)


async def answers(stub: Any, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(request, timeout=20)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (generate(temperature=math.nan), "temperature=nan must be finite"),
        (generate(temperature=math.inf), "temperature=inf must be finite"),
        (generate(top_p=math.nan), "top_p=nan must lie in"),
        (generate(top_p=-0.5), "top_p=-0.5 must lie in"),
        (generate(top_k=-1), "top_k=-1 must be at least 0"),
        (generate(trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=b"12345")), "not a multiple of 4"),
        (generate(trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=b"\xff" * 4)), r"\[0, 259\), got -1"),
        (generate([2**31 - 1]), r"\[0, 259\), got 2147483647"),
        (generate([1] * 1_000_000), "the prompt has 1000000 tokens, and max_model_len=256"),
        (generate(""), "the prompt is empty"),
        (pb.GenerateRequest(prompt_ids=pack_ids([65])), "max_new_tokens=0 must be at least 1"),
        (pb.GenerateRequest(chat=pb.ChatPrompt(), sampling=generate().sampling), "chat"),
    ],
)
async def test_a_request_that_cannot_be_drawn_is_invalid_argument_and_the_next_one_is_served(start: Start, request_: pb.GenerateRequest, words: str) -> None:
    running = await start()
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await answers(running.stub, request_)
    assert caught.value.code() == INVALID
    assert len(await answers(running.stub, generate())) == 3


@pytest.mark.parametrize("sampling", [{"seed": 2**64 - 1}, {"max_new_tokens": 2**31 - 1}, {"top_k": 2**31 - 1}, {"stop_token_ids": [2**31 - 1]}])
async def test_numbers_at_the_end_of_their_range_are_drawn_with(start: Start, sampling: dict[str, Any]) -> None:
    running = await start()
    responses = await answers(running.stub, generate([65] * 250, **sampling))
    assert 3 <= len(responses) <= 6


async def test_a_text_of_megabytes_is_refused_without_holding_up_the_others(start: Start) -> None:
    running = await start()
    longest_s, last_s = 0.0, time.monotonic()

    async def beat() -> None:
        nonlocal longest_s, last_s
        while True:
            await asyncio.sleep(0.01)
            longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()

    beating = asyncio.create_task(beat())
    with pytest.raises(grpc.aio.AioRpcError, match="max_model_len=256") as caught:
        await answers(running.stub, generate("sort " * 2_000_000))
    beating.cancel()
    assert caught.value.code() == INVALID
    assert longest_s < 2.0, f"the event loop stood still for {longest_s:.1f} s: heartbeats would have stopped too"
