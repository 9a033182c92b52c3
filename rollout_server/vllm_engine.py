"""vLLM behind the seam: draws tokens with exact version spans, and takes weight updates while requests run.

    commit:  pause ─ apply ─ flush (or salt) ─ version ─ resume

Nothing is drawn between pause and resume, so that the counts of tokens that each request has drawn (vllm_accounting.py) are
final and the switch of versions is exact. With in_flight=recompute the flush also throws away the
running requests' KV, which vLLM recomputes under the new weights; with keep it stays, and the prefix cache is salted
by version, so that no later request finds KV of older weights.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.adapter import check_fits
from rollout_server import vllm_setup
from rollout_server.checkpoint import expected_tensors
from rollout_server.config import RolloutConfig
from rollout_server.engine import (
    Delta,
    EngineInfo,
    EngineStats,
    EngineUnavailableError,
    Meter,
    SamplingSpec,
    check_prompt,
)
from rollout_server.spans import SpanTrack
from rollout_server.vllm_accounting import Accounting
from rollout_server.weights.driver import CommitError, CommitTimes
from rollout_server.weights.stopwatch import Stopwatch

logger = logging.getLogger("headrace.rollout.vllm")
Result = TypeVar("Result")

_POLL_S = 0.01


class VllmEngine:
    """One AsyncLLM. `start` may be called again after `stop`, or after the engine died."""

    def __init__(self, config: RolloutConfig, folder: Path, *, commit_timeout_s: float = 300.0) -> None:
        self._config = config
        self._folder = folder
        self._commit_timeout_s = commit_timeout_s
        self._expected = expected_tensors(folder)
        self._engine: Any = None
        self._accounting: Accounting | None = None
        self._info: EngineInfo | None = None
        self._loaded_version = 0
        self._tracks: dict[str, SpanTrack] = {}
        self._meter = Meter()
        self._serial = itertools.count()
        # One thread for the engine's whole life: its processes die with the thread that made them.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-start")
        self.apply_reason = ""  # why updates go through the engine's loader; empty: they are copied into its parameters
        self.last_commit: tuple[str, ...] = ()  # steps of the last commit in the order they ended, for tests and logs

    # --- life

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "info is known once the engine has started"
        return self._info

    async def start(self) -> None:
        """Raises ValueError for arguments that vLLM refuses, RuntimeError when its processes do not come up."""
        version = vllm_setup.vllm_version()
        on_gpu = await asyncio.get_running_loop().run_in_executor(self._starter, vllm_setup.has_gpu)
        vllm_setup.prepare_environment(self._config, on_gpu=on_gpu)
        arguments = vllm_setup.engine_arguments(self._config, self._folder, on_gpu=on_gpu)
        self._loaded_version = 0
        self._tracks.clear()
        self._engine = await asyncio.get_running_loop().run_in_executor(self._starter, vllm_setup.make_engine, arguments)
        # What was made so far lives as long as the engine: a full collection over it (hundreds of thousands of objects of torch, transformers
        # and vLLM) would hold up every stream each time. vLLM does the same in its own processes.
        gc.collect()
        gc.freeze()
        self._accounting = Accounting(self._engine)
        workers = sorted(await self._rpc("headrace_describe", timeout_s=60.0), key=lambda answer: answer["worker"])
        await self._choose_apply(self._config.apply)
        model_config = self._engine.model_config
        self._info = EngineInfo(
            name=f"vllm {version}",
            vocab_size=model_config.get_vocab_size(),
            max_model_len=model_config.max_model_len,
            device_uuid=workers[0]["device_uuid"],
            worker_device_uuids=tuple(worker["device_uuid"] for worker in workers),
            visible_device_uuids=tuple(sorted(set.intersection(*(set(worker["visible"]) for worker in workers)))),
        )

    async def use_loader(self) -> None:
        """From now on updates go through the engine's loader, as with apply: loader."""
        await self._choose_apply("loader")

    async def _choose_apply(self, apply: str) -> None:
        """Copies straight into the parameters where that is proved right on this model, else the engine's loader; says which."""
        shapes = {name: list(shape) for name, shape in self._expected}
        reasons = await self._rpc("headrace_prepare", str(self._folder), shapes, apply == "auto", timeout_s=600.0)
        self.apply_reason = next((reason for reason in reasons if reason), "")
        logger.info("updates are applied by %s", f"the engine's loader: {self.apply_reason}" if self.apply_reason else "copies into its parameters")

    async def stop(self) -> None:
        engine, self._engine, self._accounting = self._engine, None, None
        if engine is not None:
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # else it reports the end of its process as a failure
            await asyncio.get_running_loop().run_in_executor(self._starter, engine.shutdown)
            engine.shutdown = lambda *_, **__: None  # its destructor calls it again, at a time when the interpreter has taken the modules away

    async def check(self) -> None:
        if self._engine is None or self._engine.errored:
            raise EngineUnavailableError("the engine's process is not running")

    def stats(self) -> EngineStats:
        stats = self._meter.stats()
        if self._accounting is None or self._accounting.scheduler is None:
            return stats
        seen = self._accounting.scheduler
        return replace(stats, num_waiting=seen.num_waiting_reqs, kv_use=seen.kv_cache_usage, num_preempted=self._accounting.num_preempted)

    # --- drawing

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, request_id: str, *, stream: bool = True
    ) -> AsyncGenerator[Delta, None]:
        check_prompt(prompt_ids, vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len)
        await self.check()
        accounting = self._accounting
        assert accounting is not None
        inner_id = f"{request_id}#{next(self._serial)}"
        self._tracks[inner_id] = SpanTrack(self._loaded_version)
        self._meter.begin()
        try:
            async with aclosing(self._draw(list(prompt_ids), sampling, inner_id, stream)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._meter.end()
            self._tracks.pop(inner_id, None)
            accounting.forget(inner_id)

    async def _draw(self, prompt_ids: list[int], sampling: SamplingSpec, inner_id: str, stream: bool) -> AsyncGenerator[Delta, None]:
        parameters = vllm_setup.request_parameters(sampling, self.info.max_model_len - len(prompt_ids), stream)
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": f"v{self._loaded_version}"}
        num_drawn = 0
        try:
            async with aclosing(self._engine.generate(prompt, parameters, inner_id)) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    ids = list(completion.token_ids)
                    num_drawn += len(ids)
                    self._meter.num_tokens += len(ids)
                    yield self._delta(completion, ids, num_drawn, inner_id)
        except (GeneratorExit, asyncio.CancelledError, EngineUnavailableError):
            raise
        except Exception as error:  # vLLM's own types differ between versions; the two meanings do not
            raise vllm_setup.translated(error) from error

    def _delta(self, completion: Any, ids: list[int], num_drawn: int, inner_id: str) -> Delta:
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs or (), ids, strict=True)]
        finish = completion.finish_reason
        if finish is None:
            return Delta(token_ids=ids, logprobs=logprobs)
        if finish not in ("stop", "length", "abort"):
            raise EngineUnavailableError(f"vLLM ended the request with {finish!r}")
        return Delta(token_ids=ids, logprobs=logprobs, finish=finish, spans=self._tracks[inner_id].spans(num_drawn))

    def drawn(self, request_id: str, start: int = 0) -> Delta | None:
        accounting = self._accounting
        inner_id = next((name for name in self._tracks if name.rpartition("#")[0] == request_id), None)
        if inner_id is None or accounting is None or (seen := accounting.seen(inner_id, start)) is None:
            return None
        ids, logprobs = seen
        return Delta(token_ids=ids, logprobs=logprobs, spans=self._tracks[inner_id].spans(start + len(ids)))

    async def abort(self, request_id: str) -> None:
        for inner_id in [name for name in self._tracks if name.rpartition("#")[0] == request_id]:
            await self._engine.abort(inner_id)

    # --- updates (Updatable)

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
        end_s = time.monotonic() + timeout_s
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
            await asyncio.sleep(_POLL_S)

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
                if not task.done() and engine.errored:
                    raise EngineUnavailableError("the engine's process died")
                if not task.done() and time.monotonic() > end_s:
                    raise EngineUnavailableError(f"the engine did not answer within {timeout_s:.1f} s")
            return task.result()
        finally:
            task.cancel()
