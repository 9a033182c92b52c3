"""A plain engine on transformers for tests and for reading: one thread steps all running requests, a token each.

    asyncio side                                  step thread
    generate ── new request ───────────────────▶  consumes: requests, calls (commit); produces: deltas
    generate ◀─ deltas (call_soon_threadsafe) ──  waits for: a request or a call; unblocked by: the condition
    commit  ── call, runs between two steps ───▶

A commit runs between two steps by construction, so that the count of drawn tokens is exact without further care.
Chosen by `engine: small` only, never by itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from protos import faultpoints
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.adapter import MergedStaging, check_fits
from protos.weights.landing import Landing
from rollout_server.checkpoint import expected_tensors, stored
from rollout_server.config import RolloutConfig
from rollout_server.engine import (
    Delta,
    EngineInfo,
    EngineStats,
    EngineUnavailableError,
    Finish,
    Meter,
    SamplingSpec,
    check_prompt,
)
from rollout_server.latency import Latency
from rollout_server.sampling import draw
from rollout_server.small_request import Request, deltas_of
from rollout_server.spans import SpanTrack
from rollout_server.tokens import Tokens
from rollout_server.weights.driver import CommitError, CommitTimes

logger = logging.getLogger("headrace.rollout.small")
Result = TypeVar("Result")
_POLL_S = 0.005
_JOIN_S = 5.0  # for the step thread to end; one that hangs is left behind


class SmallEngine:
    """The seam of rollout_server/engine.py over `AutoModelForCausalLM` in this process."""

    def __init__(self, config: RolloutConfig, folder: Path, *, step_s: float = 0.0) -> None:
        self._config = config
        self._folder = folder
        self._step_s = step_s  # sleep before each step: tests make requests last
        self._expected = expected_tensors(folder)
        self._landing = Landing(torch.device("cpu"))
        self._model: Any = None
        self._without_text = torch.empty(0, dtype=torch.long)
        self._info: EngineInfo | None = None
        self._loaded_version = 0
        self._meter = Meter()
        self._num_drawn = 0  # counted by the drawing thread alone
        self.latency = Latency()
        self._wake = threading.Condition()
        self._requests: list[Request] = []
        self._calls: list[Callable[[], None]] = []
        self._stale = False
        self._closing = False
        self._thread: threading.Thread | None = None

    # --- life

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "info is known once the engine has started"
        return self._info

    async def start(self) -> None:
        self._model = await asyncio.to_thread(_load, self._folder, self._config.dtype)
        positions = getattr(self._model.config, "max_position_embeddings", None)
        if positions and self._config.max_model_len > positions:
            raise ValueError(f"max_model_len={self._config.max_model_len}: the model {self._folder} reads {positions} positions; set max_model_len to at most {positions}")
        self._info = EngineInfo(
            name="small", vocab_size=self._model.config.vocab_size, max_model_len=self._config.max_model_len,
            device_uuid="",
        )  # fmt: skip
        self._without_text = torch.tensor(Tokens(self._folder).without_text(self._info.vocab_size), dtype=torch.long)  # never drawn
        self._loaded_version, self._stale, self._closing, self._num_drawn, self.latency = 0, False, False, 0, Latency()
        self._thread = threading.Thread(target=self._run, name="small-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_S)
            self._thread = None
        self._fail(EngineUnavailableError("the engine was stopped while the request ran; make it again"))
        self._landing.close()

    async def check(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise EngineUnavailableError("the engine is not running")

    def stats(self) -> EngineStats:
        return replace(self._meter.stats(), num_drawn=self._num_drawn)

    # --- drawing

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, request_id: str, *, stream: bool = True
    ) -> AsyncGenerator[Delta, None]:
        check_prompt(prompt_ids, vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len)
        if sampling.bad_words or sampling.guided:
            raise ValueError("engine: small knows no bad_words, regex or json_schema; engine: vllm does")
        await self.check()
        request = Request(
            request_id=request_id, tokens=list(prompt_ids), num_prompt=len(prompt_ids), sampling=sampling,
            max_new_tokens=min(sampling.max_new_tokens, self.info.max_model_len - len(prompt_ids)),
            generator=torch.Generator().manual_seed(sampling.seed), track=SpanTrack(0),
            deltas=asyncio.Queue(), loop=asyncio.get_running_loop(),
        )  # fmt: skip
        with self._wake:
            request.track = SpanTrack(self._loaded_version)
            self._requests.append(request)
            self._wake.notify()
        self._meter.begin()
        try:
            async for delta in deltas_of(request, stream):
                self._meter.num_tokens += len(delta.token_ids)
                yield delta
        finally:
            self._meter.end()
            self._end(request)

    def drawn(self, request_id: str, start: int = 0) -> Delta | None:
        with self._wake:
            for request in self._requests:
                end = len(request.logprobs)  # written last of a step
                if request.request_id == request_id and end > start:
                    ids = request.tokens[request.num_prompt + start : request.num_prompt + end]
                    return Delta(token_ids=ids, logprobs=request.logprobs[start:end], spans=request.track.spans(end))
        return None

    async def abort(self, request_id: str) -> None:
        with self._wake:
            for request in self._requests:
                if request.request_id == request_id:
                    self._end(request)

    def _end(self, request: Request) -> None:
        """Takes effect at the next step, when the step thread sends the last delta."""
        with self._wake:
            request.stop = request.stop or "abort"
            self._wake.notify()

    # --- updates (Updatable)

    @property
    def loaded_version(self) -> int:
        return self._loaded_version

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        self._landing.begin_receive(group, manifest, timeout_s)
        await self._until_landed()

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        self._landing.begin_folder(str(folder), manifest)
        await self._until_landed()

    async def _until_landed(self) -> None:
        while (state := self._landing.state()).phase == "receiving":
            await asyncio.sleep(_POLL_S)
        if state.phase != "ready":
            raise RuntimeError(state.detail or f"the transfer was given up ({state.phase})")

    async def stage_chunks(self, manifest: bytes, chunks: AsyncIterator[tuple[int, int, bytes]]) -> None:
        check_fits(manifest_pb2.Manifest.FromString(manifest), self._expected)
        self._landing.begin_chunks(manifest)
        async for bucket, offset, data in chunks:
            self._landing.write_chunk(bucket, offset, data)
        await asyncio.to_thread(self._landing.finish_chunks)

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        def compute() -> list[float]:
            ids = torch.tensor([list(token_ids)])
            with torch.inference_mode():
                scores = torch.log_softmax(self._model(ids).logits[0].float(), -1)
            return [float(value) for value in scores[:-1].gather(1, ids[0, 1:, None])[:, 0]]

        return await asyncio.wrap_future(self._between_steps(compute))

    async def discard(self) -> None:
        self._landing.discard()

    async def commit(self, version: int) -> CommitTimes:
        if version < self._loaded_version:
            raise ValueError(f"version {version} cannot follow {self._loaded_version}: versions never fall")
        await self.check()
        staging = self._landing.take(version)
        tensors = staging.tensors()
        if staging.manifest.HasField("adapter"):
            tensors = MergedStaging(staging, lambda name: stored(self._folder, name), ()).changed()
        return await asyncio.wrap_future(self._between_steps(lambda: self._commit_now(version, tensors)))

    def _commit_now(self, version: int, tensors: Any) -> CommitTimes:
        start_s = time.monotonic()
        self._stale = True
        try:
            if self._config.apply_updates:
                self._apply(tensors)
        except Exception as error:
            raise CommitError(f"version {version} failed in apply: {type(error).__name__}: {error}") from error
        with self._wake:
            for request in self._requests:
                if self._config.in_flight == "recompute":
                    request.cache = None
                if version > self._loaded_version:
                    request.track.switch(version, num_tokens=request.num_drawn)
            self._loaded_version = version
        self._stale = False
        return CommitTimes(pause_s=time.monotonic() - start_s)

    def _apply(self, tensors: Any) -> None:
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                parameters[name].copy_(tensor)

    def _between_steps(self, call: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            self._calls.append(run)
            self._wake.notify()
        return future

    # --- the step thread

    def _run(self) -> None:
        try:
            self._steps()
        except Exception as error:
            logger.exception("the step thread ends")
            self._fail(EngineUnavailableError(f"the engine died: {type(error).__name__}: {error}"))

    def _fail(self, error: EngineUnavailableError) -> None:
        with self._wake:
            given_up, self._requests = self._requests, []
        for request in given_up:
            request.put(error)

    def _steps(self) -> None:
        while self._wait_for_work():
            with self._wake:
                calls, self._calls = self._calls, []
            for call in calls:
                call()
            with self._wake:
                running = [] if self._stale else self._requests[: self._config.max_num_seqs]
                ended = [request for request in self._requests if request.stop is not None]
            if running:
                faultpoints.point("engine_step")
            if self._step_s:
                time.sleep(self._step_s)
            for request in running:
                if request.stop is None:
                    self._step(request)
            for request in ended:
                request.put(Delta(token_ids=(), logprobs=(), finish="abort", spans=request.track.spans(request.num_drawn)))
            with self._wake:
                self._requests = [request for request in self._requests if request not in ended and not request.finished]

    def _wait_for_work(self) -> bool:
        def work() -> bool:
            can_step = bool(self._requests) and not self._stale
            return self._closing or bool(self._calls) or can_step or any(r.stop for r in self._requests)

        with self._wake:
            self._wake.wait_for(work)
            return not self._closing

    def _step(self, request: Request) -> None:
        """Draws one token, and sends it."""
        try:
            new = request.tokens if request.cache is None else request.tokens[-1:]
            with torch.inference_mode():
                output = self._model(torch.tensor([new]), past_key_values=request.cache, use_cache=True)
            request.cache = output.past_key_values
            logits = output.logits[0, -1].index_fill(0, self._without_text, -torch.inf)
            token, logprob = draw(logits, request.sampling, request.generator)
        except Exception as error:  # one request's failure is its own
            request.max_new_tokens = request.num_drawn
            request.put(EngineUnavailableError(f"{type(error).__name__}: {error}"))
            return
        request.tokens.append(token)
        self._count(request)
        request.logprobs.append(logprob)
        finish: Finish | None = None
        if token in request.sampling.stop_token_ids:
            finish, request.max_new_tokens = "stop", request.num_drawn
        elif request.num_drawn >= request.max_new_tokens:
            finish = "length"
        if finish:
            self.latency.gaps(time.monotonic() - request.begun_s, request.num_drawn - 1)
        spans = request.track.spans(request.num_drawn) if finish else ()
        request.put(Delta(token_ids=(token,), logprobs=(logprob,), finish=finish, spans=spans))

    def _count(self, request: Request) -> None:
        self._num_drawn += 1
        if request.num_drawn == 1:
            now_s = time.monotonic()
            self.latency.first_token(now_s - request.begun_s)
            request.begun_s = now_s


def _load(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
