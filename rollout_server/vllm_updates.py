"""Weight updates of a running vLLM engine, as one transaction while requests run.

    commit:  pause ─ apply ─ flush (or salt) ─ version ─ resume

Nothing is drawn between pause and resume, so that the counts of tokens that each request has drawn (vllm_accounting.py) are
final and the switch of versions is exact. With in_flight=recompute the flush also throws away the
running requests' KV, which vLLM recomputes under the new weights; with keep it stays, and the prefix cache is salted
by version, so that no later request finds KV of older weights.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.adapter import check_fits
from rollout_server import vllm_setup
from rollout_server.checkpoint import expected_tensors
from rollout_server.config import RolloutConfig
from rollout_server.engine import EngineUnavailableError
from rollout_server.spans import SpanTrack
from rollout_server.vllm_accounting import Accounting
from rollout_server.weights.driver import CommitError, CommitTimes
from rollout_server.weights.stopwatch import Stopwatch

Result = TypeVar("Result")

_POLL_S, _LONGEST_POLL_S = 0.01, 0.05  # each question is answered between two steps of the engine, and costs them a little


class VllmUpdates:
    """What VllmEngine keeps of its AsyncLLM, and how versions get into it (the Updatable half of the seam)."""

    def __init__(self, config: RolloutConfig, folder: Path, *, commit_timeout_s: float = 300.0) -> None:
        self._config = config
        self._folder = folder
        self._commit_timeout_s = commit_timeout_s
        self._expected = expected_tensors(folder)
        self._engine: Any = None
        self._accounting: Accounting | None = None
        self._loaded_version = 0
        self._tracks: dict[str, SpanTrack] = {}  # of every running request, by inner id
        self._serial = itertools.count()
        self.last_commit: tuple[str, ...] = ()  # steps of the last commit in the order they ended, for tests and logs

    @property
    def loaded_version(self) -> int:
        return self._loaded_version

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        await self._rpc("headrace_begin_receive", group, manifest, timeout_s, timeout_s=60.0)
        await self._until_landed(timeout_s)

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        await self._rpc("headrace_begin_folder", str(folder), manifest, timeout_s=60.0)
        await self._until_landed(timeout_s)

    async def _until_landed(self, timeout_s: float) -> None:
        """Returns once every worker has its part. Raises what the first failed worker says."""
        end_s, poll_s = time.monotonic() + timeout_s, _POLL_S
        while True:
            answers = await self._rpc("headrace_state", timeout_s=60.0)
            if all(phase == "ready" for phase, _ in answers):
                return
            for worker, (phase, detail) in enumerate(answers):
                if phase not in ("ready", "receiving"):
                    where = f"worker {worker} of {len(answers)}: " if len(answers) > 1 else ""
                    raise RuntimeError(where + (detail or f"the transfer was given up ({phase})"))
            if time.monotonic() > end_s:
                await self.discard()
                raise TimeoutError(f"the transfer did not end within {timeout_s} s")
            await asyncio.sleep(poll_s)
            poll_s = min(1.2 * poll_s, _LONGEST_POLL_S)

    async def stage_chunks(self, manifest: bytes, chunks: AsyncIterator[tuple[int, int, bytes]]) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        await self._rpc("headrace_begin_chunks", manifest, timeout_s=60.0)
        async for bucket, offset, data in chunks:
            await self._rpc("headrace_write_chunk", bucket, offset, data, timeout_s=60.0)
        await self._rpc("headrace_finish_chunks", timeout_s=300.0)

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        name = f"probe#{next(self._serial)}"
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": name}
        async with aclosing(self._engine.generate(prompt, vllm_setup.probe_parameters(), name)) as outputs:
            async for output in outputs:
                scores = output.prompt_logprobs or ()
        return [entry[token].logprob for entry, token in zip(scores[1:], token_ids[1:], strict=True)]

    async def discard(self) -> None:
        if self._engine is not None and not self._engine.errored:
            await self._rpc("headrace_discard", timeout_s=60.0)

    async def commit(self, version: int) -> CommitTimes:
        """A failure before the weights are touched leaves the old version serving; one after it leaves the engine paused."""
        if version < self._loaded_version:
            raise ValueError(f"version {version} cannot follow {self._loaded_version}: versions never fall")
        end_s = time.monotonic() + self._commit_timeout_s
        await self._rpc("headrace_take", version, timeout_s=60.0)
        watch = Stopwatch()
        try:
            core = self._engine.engine_core  # below the front end, whose own pause sleeps 20 ms and waits behind every output
            await self._guarded(core.pause_scheduler_async(mode="keep", clear_cache=False), end_s - time.monotonic())
            watch.lap("pause")
        except BaseException:
            await self._resume()
            raise
        try:
            await self._apply(version, end_s, watch)
        except BaseException as error:
            raise CommitError(f"version {version} failed after {watch.last}: {type(error).__name__}: {error}") from error
        self.last_commit = tuple(watch.pieces_s)
        return CommitTimes(pause_s=watch.total_s, pieces_s=watch.pieces_s)

    async def _apply(self, version: int, end_s: float, watch: Stopwatch) -> None:
        """The scheduler rests."""
        labelling = asyncio.ensure_future(self._label(version))
        try:
            if self._config.apply_updates:
                await self._rpc("headrace_apply", timeout_s=end_s - time.monotonic())
            watch.lap("apply")
            if self._config.in_flight == "recompute":
                flushed = await self._guarded(self._engine.reset_prefix_cache(reset_running_requests=True), end_s - time.monotonic())
                if flushed is False:
                    raise RuntimeError("vLLM refused to flush its prefix cache")
            watch.lap("flush")
            await self._guarded(labelling, end_s - time.monotonic())
        finally:
            labelling.cancel()
        self._switch(version)
        watch.lap("version")
        await self._resume()
        watch.lap("resume")

    async def _label(self, version: int) -> None:
        """vLLM's own label, from 0.32 on."""
        if hasattr(self._engine, "update_weight_version"):
            await self._engine.update_weight_version(str(version))

    async def _resume(self) -> None:
        if self._engine is not None and not self._engine.errored:
            await self._guarded(self._engine.engine_core.resume_scheduler_async(), 60.0)

    def _switch(self, version: int) -> None:
        """Labels what is drawn from now on. Requests that the front end has not admitted yet have drawn nothing."""
        if version == self._loaded_version:
            return  # the same version again, after it was found not to be what the trainer has
        assert self._accounting is not None
        num_drawn = self._accounting.num_drawn()
        for inner_id, track in self._tracks.items():
            if inner_id in num_drawn:
                track.switch(version, num_tokens=num_drawn[inner_id])
            elif not self._accounting.was_admitted(inner_id):
                track.switch(version, num_tokens=0)
        self._loaded_version = version

    async def _rpc(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """One call of the worker extension, between two engine steps; one result a worker."""
        if self._engine is None:
            raise EngineUnavailableError("the engine is not running")
        return await self._guarded(self._engine.collective_rpc(method, args=arguments), timeout_s)

    async def _guarded(self, call: Awaitable[Result], timeout_s: float) -> Result:
        """A call on the engine. Raises EngineUnavailableError when the engine dies meanwhile or timeout_s has passed."""
        engine, task = self._engine, asyncio.ensure_future(call)
        end_s = time.monotonic() + timeout_s
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.5)
                if not task.done() and self._engine is not engine:
                    raise EngineUnavailableError("the engine was stopped")
                if not task.done() and engine.errored:
                    raise EngineUnavailableError("the engine's process died")
                if not task.done() and time.monotonic() > end_s:
                    raise EngineUnavailableError(f"the engine did not answer within {timeout_s:.1f} s")
            return task.result()
        except Exception as error:
            if type(error).__name__ == "EngineDeadError":  # vLLM's own, whose module differs between versions
                raise EngineUnavailableError("the engine's process died") from error
            raise
        finally:
            task.cancel()
