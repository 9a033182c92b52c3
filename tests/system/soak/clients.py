"""The clients of a soak: each kind does one thing for ever, and counts how it went. What should not happen is kept in words."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos import rpc
from protos.arrays import pack_ids, unpack
from protos.rollout.v1alpha1 import rollout_pb2 as pb
from protos.rollout.v1alpha1 import rollout_pb2_grpc
from protos.trajectory.v1alpha1 import trajectory_pb2

MAX_MODEL_LEN = 256
SHARED_PREFIX = [70 + i % 90 for i in range(64)]  # two KV blocks that many prompts begin with
_ENDED = (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH)
_KEPT_WRONGS = 20


@dataclass(kw_only=True, slots=True)
class Tally:
    """Mutable: the clients share it."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # the first of what should not have happened
    num_tokens: int = 0
    updates_s: list[float] = field(default_factory=list)  # pauses

    def is_wrong(self, words: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < _KEPT_WRONGS:
            self.wrong.append(words)


def sampling(rng: random.Random, *, most: int = 120) -> trajectory_pb2.SamplingParams:
    return trajectory_pb2.SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([0.0, 0.9]), max_new_tokens=rng.randint(1, most), seed=rng.getrandbits(31), stop_token_ids=rng.choice([[], [65, 66]])
    )  # fmt: skip


def prompt(rng: random.Random) -> list[int]:
    tail = [rng.randrange(3, 259) for _ in range(rng.randint(1, 60))]
    return [*SHARED_PREFIX, *tail] if rng.random() < 0.5 else tail


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A whole completion as it came."""

    ids: list[int]
    logprobs: list[float]
    last: pb.GenerateResponse

    def faults(self) -> list[str]:
        """What is wrong with it, in words."""
        spans = [(span.version, span.start, span.end) for span in self.last.spans]
        starts = [start for _, start, _ in spans] + [len(self.ids)]
        found = []
        if len(self.ids) != len(self.logprobs) or not self.ids:
            found.append(f"{len(self.ids)} tokens with {len(self.logprobs)} log-probs")
        if not all(math.isfinite(value) and value <= 1e-5 for value in self.logprobs):
            found.append("log-probs that are none")
        if not spans or spans[0][1] != 0 or [end for _, _, end in spans] != starts[1:]:
            found.append(f"spans {spans} do not cover {len(self.ids)} tokens")
        return found


async def whole(stub: Any, request: pb.GenerateRequest, *, timeout_s: float = 300.0) -> Answer:
    """Raises AioRpcError as the service says."""
    ids: list[int] = []
    logprobs: list[float] = []
    last = pb.GenerateResponse()
    async for last in stub.Generate(request, timeout=timeout_s):
        ids += [int(token) for token in unpack(last.token_ids)]
        logprobs += [float(value) for value in unpack(last.logprobs)]
    return Answer(ids=ids, logprobs=logprobs, last=last)


async def stream(stub: Any, tally: Tally, rng: random.Random) -> None:
    """Reads to the end, and looks at what came."""
    answer = await whole(stub, pb.GenerateRequest(prompt_ids=pack_ids(prompt(rng)), sampling=sampling(rng)))
    tally.counts["ended"] += 1
    tally.num_tokens += len(answer.ids)
    if answer.last.finish_reason not in _ENDED:
        tally.is_wrong(f"a stream ended with finish reason {answer.last.finish_reason}")
    for fault in answer.faults():
        tally.is_wrong(fault)


async def texts(stub: Any, tally: Tally, rng: random.Random) -> None:
    """A text or a chat, decoded text wanted."""
    made = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 80)))
    request = pb.GenerateRequest(text=made, sampling=sampling(rng), detokenize=True)
    if rng.random() < 0.5:
        request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatPrompt.Message(role="user", content=made)]), sampling=sampling(rng), detokenize=True)
    answer = await whole(stub, request)
    tally.counts["ended_text"] += 1
    tally.num_tokens += len(answer.ids)
    for fault in answer.faults():
        tally.is_wrong(fault)


async def cancels(stub: Any, tally: Tally, rng: random.Random) -> None:
    """Goes away: at once, in the middle, or by its deadline."""
    request = pb.GenerateRequest(prompt_ids=pack_ids(prompt(rng)), sampling=sampling(rng, most=180))
    call = stub.Generate(request, timeout=rng.choice([0.02, 0.3, 60.0]))
    with contextlib.suppress(grpc.aio.AioRpcError):
        for _ in range(rng.choice([0, 1, 5])):
            if await call.read() is grpc.aio.EOF:
                break
    call.cancel()
    tally.counts["cancelled"] += 1
    await asyncio.sleep(rng.random() * 0.1)


async def never_reads(stub: Any, tally: Tally, rng: random.Random) -> None:
    """Asks for much, reads nothing for some seconds, goes away."""
    call = stub.Generate(pb.GenerateRequest(prompt_ids=pack_ids(prompt(rng)), sampling=sampling(rng)), timeout=60)
    await asyncio.sleep(rng.uniform(0.5, 5.0))
    call.cancel()
    tally.counts["never_read"] += 1


_MINUS_ONE = trajectory_pb2.PackedArray(dtype=trajectory_pb2.PACKED_DTYPE_INT32, data=b"\xff\xff\xff\xff")
BAD: tuple[pb.GenerateRequest, ...] = (
    pb.GenerateRequest(sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=pack_ids([]), sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=pack_ids([5] * MAX_MODEL_LEN), sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=pack_ids([100_000]), sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=_MINUS_ONE, sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=pack_ids([5]), sampling=trajectory_pb2.SamplingParams(temperature=-1, max_new_tokens=4)),
    pb.GenerateRequest(prompt_ids=pack_ids([5]), sampling=trajectory_pb2.SamplingParams(temperature=1)),
    pb.GenerateRequest(prompt_ids=pack_ids([5]), sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4, top_p=1.5)),
    pb.GenerateRequest(text="a" * 100_000, sampling=trajectory_pb2.SamplingParams(temperature=1, max_new_tokens=4)),
)  # fmt: skip


async def bad(stub: Any, tally: Tally, rng: random.Random) -> None:
    """Every kind of request that must be refused by name."""
    request = rng.choice(BAD)
    try:
        await whole(stub, request)
        tally.is_wrong(f"a bad request was answered: {str(request)[:100]}")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not error.details():
            raise
    tally.counts["refused"] += 1
    await asyncio.sleep(rng.random() * 0.2)


class Updates:
    """Loads the folders in turn, every `every_s`, while everything else goes on; each time the same greedy request must bring what it
    brought before under the same weights."""

    def __init__(self, folders: list[Path], *, every_s: float) -> None:
        self._folders = folders
        self._every_s = every_s
        self._seen: dict[Path, Answer] = {}
        self._turn = 0

    async def __call__(self, stub: Any, tally: Tally, rng: random.Random) -> None:
        folder = self._folders[self._turn % len(self._folders)]
        self._turn += 1
        loaded = await stub.LoadWeights(pb.LoadWeightsRequest(path=str(folder)), timeout=120)
        tally.counts["updated"] += 1
        tally.updates_s.append(loaded.pause_s)
        greedy = trajectory_pb2.SamplingParams(temperature=0.0, max_new_tokens=24, seed=1)
        answer = await whole(stub, pb.GenerateRequest(prompt_ids=pack_ids(SHARED_PREFIX), sampling=greedy))
        before = self._seen.setdefault(folder, answer)
        if answer.ids != before.ids or max(abs(a - b) for a, b in zip(answer.logprobs, before.logprobs, strict=True)) > 1e-3:
            tally.is_wrong(f"after update {self._turn} the weights of {folder.name} draw {answer.ids}, before they drew {before.ids}")
        await asyncio.sleep(self._every_s)


Kind = Callable[[Any, Tally, random.Random], Awaitable[None]]


async def for_ever(kind: Kind, address: str, tally: Tally, *, seed: int, reconnects: bool) -> None:
    """One client. With reconnects each request comes over a connection of its own."""
    rng = random.Random(seed)
    async with rpc.channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        while True:
            try:
                if reconnects:
                    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as fresh:
                        await kind(rollout_pb2_grpc.RolloutServiceStub(fresh), tally, rng)
                else:
                    await kind(stub, tally, rng)
            except grpc.aio.AioRpcError as error:
                tally.is_wrong(f"{getattr(kind, '__name__', type(kind).__name__)}: {error.code().name}: {error.details()}")
                await asyncio.sleep(1.0)
