"""Plain gRPC clients of the services, as a stranger would write them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import numpy as np

from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """One completion as it came. Example: Generated(prompt=[5], completion=[7, 2], logprobs=[-0.1, -2.0], spans=[(3, 0, 2)], finish_reason=1)"""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]  # (version, start, end)
    finish_reason: int


async def generate(address: str, prompt: list[int], *, max_new_tokens: int, seed: int, temperature: float = 1.0) -> Generated:
    """Raises grpc.aio.AioRpcError as the service says."""
    request = rollout_pb2.GenerateRequest(
        prompt_ids=trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=np.asarray(prompt, "<i4").tobytes()),
        sampling=trajectory_pb2.SamplingParams(temperature=temperature, top_p=1, max_new_tokens=max_new_tokens, seed=seed),
    )
    ids: list[int] = []
    logprobs: list[float] = []
    async with grpc.aio.insecure_channel(address) as channel:
        async for answer in rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=300):
            ids += np.frombuffer(answer.token_ids.data, "<i4").tolist()
            logprobs += np.frombuffer(answer.logprobs.data, "<f4").tolist()
    spans = [(span.version, span.start, span.end) for span in answer.spans]
    return Generated(prompt=prompt, completion=ids, logprobs=logprobs, spans=spans, finish_reason=answer.finish_reason)


async def stream_until(address: str, prompts: list[list[int]], stop: asyncio.Event, *, max_new_tokens: int) -> list[Generated]:
    """Keeps one request running per prompt until `stop` is set; all that ended."""

    async def one(index: int, prompt: list[int]) -> list[Generated]:
        done: list[Generated] = []
        while not stop.is_set():
            done.append(await generate(address, prompt, max_new_tokens=max_new_tokens, seed=1000 * index + len(done)))
        return done

    return [item for some in await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))) for item in some]
