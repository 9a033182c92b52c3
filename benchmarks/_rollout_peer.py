"""One side of `rollout_tax` in a process of its own: draws bursts of requests by one way and tells how long they took.

    python -m benchmarks._rollout_peer engine|grpc|http SPEC.json

Lines of JSON in: {"requests": [[prompt ids, new tokens], ...], "concurrent": n, "seed": s, "way": w, "out": path or ""}; lines of JSON out: {"ready": 1}
first, then {"seconds", "tokens", "cpu_s"} for each, or {"failed": why}. `out` gets what was drawn, as JSON: [[prompt, ids, log-probs], ...].
The clock runs from the first request to the last token. As many workers as are concurrent take the requests in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2, rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

Drawn = tuple[list[int], list[int], list[float]]  # prompt ids, completion ids, their log-probs (none of a bare burst)
Draw = Callable[[list[int], int, int], Awaitable[Drawn]]  # (prompt ids, new tokens, seed)
Ways = Callable[[str], Draw]


async def burst(draw: Draw, requests: Sequence[tuple[list[int], int]], *, concurrent: int, seed: int) -> tuple[float, list[Drawn]]:
    """(seconds, what was drawn in the order of the requests)."""
    numbers = iter(range(len(requests)))
    found: list[Drawn | None] = [None] * len(requests)

    async def work() -> None:
        for number in numbers:
            prompt, new_tokens = requests[number]
            found[number] = await draw(prompt, new_tokens, seed * 100_003 + number + 1)

    began_s = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(concurrent)])
    seconds = time.perf_counter() - began_s
    return seconds, [drawn for drawn in found if drawn is not None]


# --- vLLM's AsyncLLM in this process, as its user would: whole completions


@asynccontextmanager
async def engine_ways(spec: dict[str, Any]) -> AsyncIterator[Ways]:
    """Ways "logprobs" and "bare"."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["arguments"]))

    def way(name: str) -> Draw:
        async def draw(prompt: list[int], new_tokens: int, seed: int) -> Drawn:
            parameters = SamplingParams(
                temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=seed, logprobs=0 if name == "logprobs" else None, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )  # fmt: skip
            async for output in engine.generate({"prompt_token_ids": prompt}, parameters, f"{name}-{seed}"):
                completion = output.outputs[0]
            ids = list(completion.token_ids)
            return prompt, ids, [entry[token].logprob for entry, token in zip(completion.logprobs, ids, strict=True)] if name == "logprobs" else []

        return draw

    try:
        yield way
    finally:
        engine.shutdown()


# --- our service over gRPC


@asynccontextmanager
async def grpc_ways(spec: dict[str, Any]) -> AsyncIterator[Ways]:
    """Ways "stream" (deltas as they come) and "whole" (one message)."""
    async with rpc.channel(spec["address"]) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)

        def way(name: str) -> Draw:
            async def draw(prompt: list[int], new_tokens: int, seed: int) -> Drawn:
                sampling = trajectory_pb2.SamplingParams(temperature=1.0, max_new_tokens=new_tokens, seed=seed)
                request = rollout_pb2.GenerateRequest(prompt_ids=pack_ids(prompt), sampling=sampling, whole=name == "whole")
                parts = [(unpack(answer.token_ids), unpack(answer.logprobs)) async for answer in stub.Generate(request, timeout=600)]
                ids, logprobs = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
                return prompt, ids.tolist(), logprobs.tolist()

            return draw

        yield way


# --- vLLM's OpenAI server over HTTP


@asynccontextmanager
async def http_ways(spec: dict[str, Any]) -> AsyncIterator[Ways]:
    """Ways "completions" (/v1/completions) and "tokens" (/inference/v1/generate), each with ids and the sampled tokens' log-probs, no stream.

    Connections are kept: one for each request that runs.
    """
    host, _, port = spec["address"].rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port), limit=1 << 26)
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        answer: dict[str, Any] = json.loads(await reader.readexactly(length))
        if " 200 " not in head.partition("\r\n")[0]:
            raise RuntimeError(f"{path} answered {head.partition(chr(13))[0]}: {str(answer)[:500]}")
        idle.append((reader, writer))
        return answer

    async def completions(prompt: list[int], new_tokens: int, seed: int) -> Drawn:
        body = {"model": spec["model"], "prompt": prompt, "max_tokens": new_tokens, "temperature": 1.0, "seed": seed, "logprobs": 0, "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        (choice,) = (await post("/v1/completions", body))["choices"]
        return prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"]

    async def tokens(prompt: list[int], new_tokens: int, seed: int) -> Drawn:
        sampling = {"temperature": 1.0, "max_tokens": new_tokens, "seed": seed, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        (choice,) = (await post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling, "stream": False}))["choices"]
        return prompt, choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

    yield lambda name: {"completions": completions, "tokens": tokens}[name]
    for _, writer in idle:
        writer.close()


WAYS = {"engine": engine_ways, "grpc": grpc_ways, "http": http_ways}


async def main(kind: str, spec: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    async with aclosing(_lines()) as lines, WAYS[kind](spec) as ways:
        _say({"ready": 1})
        async for order in lines:
            cpu_s = time.process_time()
            try:
                seconds, drawn = await burst(ways(order["way"]), order["requests"], concurrent=order["concurrent"], seed=order["seed"])
            except Exception as error:  # supervised edge: a way that this server does not have is left out, and told
                _say({"failed": f"{type(error).__name__}: {error}"[:600]})
                continue
            _say({"seconds": seconds, "tokens": sum(len(ids) for _, ids, _ in drawn), "cpu_s": time.process_time() - cpu_s})
            if order["out"]:
                await loop.run_in_executor(None, Path(order["out"]).write_text, json.dumps(drawn))
                _say({"written": 1})


async def _lines() -> Any:
    """Orders from stdin until its end."""
    reader = asyncio.StreamReader(limit=1 << 28)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def _say(message: dict[str, Any]) -> None:
    os.write(_OUT, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    _OUT = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    uvloop.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text())))
