"""Tokens and log-probs from a rollout server: `python examples/generate.py 127.0.0.1:7440 "1 + 1 ="`.

The server: `headrace serve rollout --model models/smollm2 --address 127.0.0.1:7440`.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from protos.arrays import unpack
from protos.mistakes import check_address
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.rpc import channel
from protos.trajectory.v1alpha1 import trajectory_pb2


async def generate(address: str, prompt: str) -> tuple[str, list[int], list[float]]:
    """Text, token ids and their log-probs. Deltas come as they are drawn; sampling parameters are always stated, there are no defaults."""
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=16, seed=1)
    request = rollout_pb2.GenerateRequest(text=prompt, sampling=sampling, detokenize=True)
    text, ids, logprobs = "", list[int](), list[float]()
    async with channel(address) as opened:
        async for delta in rollout_pb2_grpc.RolloutServiceStub(opened).Generate(request, timeout=120):
            text = delta.text or text
            ids += unpack(delta.token_ids).tolist()
            logprobs += unpack(delta.logprobs).tolist()
    return text, ids, logprobs


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit('usage: python examples/generate.py HOST:PORT "a prompt"')
    try:
        check_address("HOST:PORT", sys.argv[1])
        for part in asyncio.run(generate(sys.argv[1], sys.argv[2])):
            print(part)
    except ValueError as error:
        sys.exit(str(error))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            sys.exit(f"another service than a rollout server answers at {sys.argv[1]}")
        sys.exit(f"the rollout server at {sys.argv[1]} did not answer ({error.code().name}: {error.details()}); it is started by `headrace serve rollout --model models/smollm2 --address {sys.argv[1]}`")
