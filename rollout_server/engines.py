"""Several engines behind one seam: requests are spread by load, the samples of one prompt stay together, an update reaches all.

    generate   the engine that draws this prompt already, while it has a place; else the one with the fewest requests
    updates    every engine receives and stages its own; they commit at the same time, each exact for its own requests

The version that counts for leases is the least of all. A commit that some made and others did not leaves the replica STALE: two
policies under one name are none. An engine that dies takes the others along: the replica is restarted as a whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from protos.learner.v1alpha1 import learner_pb2
from rollout_server.engine import Delta, Engine, EngineInfo, EngineStats, Meter, SamplingSpec
from rollout_server.latency import Latency
from rollout_server.weights.driver import CommitError, CommitTimes

Result = TypeVar("Result")
_AHEAD = 4  # chunks of an update that wait for the slowest engine
_SPREAD = 0.1  # nats by which engines with the same weights may differ on one token of a probe


class Engines:
    """The seam of engine.py over several of it. `num_seqs`: places of each; `num_workers`: of each."""

    def __init__(self, engines: Sequence[Engine], *, num_seqs: int, num_workers: int) -> None:
        assert len(engines) > 1, "one engine needs nobody to spread requests"
        self._engines = list(engines)
        self._num_seqs = num_seqs
        self._num_workers = num_workers
        self._running = [0] * len(engines)
        self._homes: dict[bytes, list[int]] = {}  # by prompt: the engines of its running requests
        self._meter = Meter()

    # --- life

    @property
    def info(self) -> EngineInfo:
        infos = [engine.info for engine in self._engines]
        return replace(
            infos[0], name=f"{infos[0].name} x{len(infos)}", worker_device_uuids=tuple(uuid for info in infos for uuid in info.worker_device_uuids),
            visible_device_uuids=tuple(sorted(set.intersection(*(set(info.visible_device_uuids) for info in infos)))),
        )  # fmt: skip

    async def start(self) -> None:
        """One after the other: each sets its environment for its processes."""
        for engine in self._engines:
            await engine.start()

    async def stop(self) -> None:
        await self._all(lambda engine: engine.stop())

    async def check(self) -> None:
        for engine in self._engines:
            await engine.check()

    def stats(self) -> EngineStats:
        """Sums; of the KV cache the fullest, since that is where requests are preempted."""
        each = [engine.stats() for engine in self._engines]
        told = [stats.kv_use for stats in each if stats.kv_use is not None]
        return replace(
            self._meter.stats(), num_tokens=sum(stats.num_tokens for stats in each), kv_use=max(told, default=None),
            num_waiting=_total([stats.num_waiting for stats in each]), num_preempted=_total([stats.num_preempted for stats in each]),
            num_drawn=_total([stats.num_drawn for stats in each]), num_prefix_tokens=_total([stats.num_prefix_tokens for stats in each]),
            num_prefix_hit_tokens=_total([stats.num_prefix_hit_tokens for stats in each]),
        )  # fmt: skip

    @property
    def latency(self) -> Latency:
        return Latency.of([engine.latency for engine in self._engines])

    # --- drawing

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, request_id: str, *, stream: bool = True
    ) -> AsyncGenerator[Delta, None]:
        prompt = b"".join(int(token).to_bytes(8, "little", signed=True) for token in prompt_ids)
        place = self._place(prompt)
        homes = self._homes.setdefault(prompt, [])
        homes.append(place)
        self._running[place] += 1
        self._meter.begin()
        try:
            async with aclosing(self._engines[place].generate(prompt_ids, sampling, request_id, stream=stream)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._meter.end()
            self._running[place] -= 1
            homes.remove(place)
            if not homes and self._homes.get(prompt) is homes:
                del self._homes[prompt]

    def _place(self, prompt: bytes) -> int:
        """Where a request goes: a prompt's KV is computed once, so its samples share it where they are together."""
        homes = self._homes.get(prompt)
        if homes and self._running[homes[-1]] < self._num_seqs:
            return homes[-1]
        return min(range(len(self._engines)), key=self._running.__getitem__)

    def drawn(self, request_id: str, start: int = 0) -> Delta | None:
        found = (engine.drawn(request_id, start) for engine in self._engines)
        return next((delta for delta in found if delta is not None), None)

    async def abort(self, request_id: str) -> None:
        await self._all(lambda engine: engine.abort(request_id))

    # --- updates (Updatable)

    @property
    def loaded_version(self) -> int:
        return min(engine.loaded_version for engine in self._engines)

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        """Every worker of every engine is a member of the learner's group, in this order."""

        def receiving(number: int, engine: Engine) -> Awaitable[None]:
            spec = learner_pb2.GroupSpec.FromString(group)
            spec.receiver_rank += number * self._num_workers
            return engine.receive(spec.SerializeToString(), manifest, timeout_s)

        await _together([receiving(number, engine) for number, engine in enumerate(self._engines)])

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        await self._all(lambda engine: engine.stage_folder(folder, manifest, timeout_s))

    async def stage_chunks(self, manifest: bytes, chunks: AsyncIterator[tuple[int, int, bytes]]) -> None:
        queues: list[asyncio.Queue[tuple[int, int, bytes] | None]] = [asyncio.Queue(_AHEAD) for _ in self._engines]

        async def pump() -> None:
            async for chunk in chunks:
                for queue in queues:
                    await queue.put(chunk)
            for queue in queues:
                await queue.put(None)

        async def taken(queue: asyncio.Queue[tuple[int, int, bytes] | None]) -> AsyncIterator[tuple[int, int, bytes]]:
            while (chunk := await queue.get()) is not None:
                yield chunk

        staging = [engine.stage_chunks(manifest, taken(queue)) for engine, queue in zip(self._engines, queues, strict=True)]
        await _together([pump(), *staging])

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Raises RuntimeError where the engines do not say the same: then one of them does not hold the version."""
        each = await self._all(lambda engine: engine.probe(token_ids))
        for number, values in enumerate(each[1:], start=1):
            difference = max((abs(a - b) for a, b in zip(each[0], values, strict=True)), default=0.0)
            if difference > _SPREAD:
                raise RuntimeError(f"engines 0 and {number} of {len(each)} differ by {difference:.4g} nats on a probe token: they do not hold the same weights")
        return each[0]

    async def discard(self) -> None:
        await self._all(lambda engine: engine.discard())

    async def commit(self, version: int) -> CommitTimes:
        """At the same time. What all refuse leaves the old version serving; what only some made is a CommitError."""
        ends = await asyncio.gather(*(engine.commit(version) for engine in self._engines), return_exceptions=True)
        failed = {number: end for number, end in enumerate(ends) if isinstance(end, BaseException)}
        if not failed:
            return max((end for end in ends if isinstance(end, CommitTimes)), key=lambda times: times.pause_s)
        first = next(iter(failed.values()))
        if len(failed) == len(ends) and not any(isinstance(error, CommitError) for error in failed.values()):
            raise first
        words = "; ".join(f"engine {number} of {len(ends)}: {type(error).__name__}: {error}" for number, error in failed.items())
        raise CommitError(f"version {version} is not in all engines: {words}") from first

    async def _all(self, call: Callable[[Engine], Awaitable[Result]]) -> list[Result]:
        return await _together([call(engine) for engine in self._engines])


async def _together(calls: Sequence[Awaitable[Result]]) -> list[Result]:
    """Their results in order. Raises the first failure, once the others have been cancelled and are over."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _total(values: Sequence[int | None]) -> int | None:
    """The sum; None where one does not tell."""
    told = [value for value in values if value is not None]
    return sum(told) if len(told) == len(values) else None
