"""vLLM behind the seam: its life, and drawing tokens with exact version spans (vllm_updates.py has the other half).

Tokens leave vLLM in columns (vllm_intake.py) where its version is one on which that is tested; else, or with `fast_path: false`, by
vLLM's own way, an object a token. Both give the same tokens and the same log-probs to the last bit.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from protos.gpus import check_given
from rollout_server import vllm_setup
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
from rollout_server.latency import Latency
from rollout_server.spans import SpanTrack
from rollout_server.tokens import Tokens
from rollout_server.vllm_accounting import Accounting
from rollout_server.vllm_drawing import Part, by_columns, by_objects
from rollout_server.vllm_intake import Intake
from rollout_server.vllm_updates import VllmUpdates

logger = logging.getLogger("headrace.rollout.vllm")
_STOPPED = "the engine was stopped while the request ran; make it again"


class VllmEngine(VllmUpdates):
    """One AsyncLLM. `start` may be called again after `stop`, or after the engine died."""

    def __init__(self, config: RolloutConfig, folder: Path, *, commit_timeout_s: float = 300.0, number: int = 0) -> None:
        """number: of a server's several engines, which this is; it decides on which GPUs its processes run."""
        super().__init__(config, folder, commit_timeout_s=commit_timeout_s)
        self._number = number
        self._info: EngineInfo | None = None
        self._meter = Meter()
        # One thread for the engine's whole life: its processes die with the thread that made them.
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vllm-start")
        self.apply_reason = ""  # why updates go through the engine's loader; empty: they are copied into its parameters

    # --- life

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "info is known once the engine has started"
        return self._info

    async def start(self) -> None:
        """Raises ValueError for arguments that vLLM refuses, RuntimeError when its processes do not come up."""
        version = vllm_setup.vllm_version()
        on_gpu = await asyncio.get_running_loop().run_in_executor(self._starter, vllm_setup.has_gpu)
        vllm_setup.check_quantization(self._config, self._folder, on_gpu=on_gpu)
        vllm_setup.prepare_environment(self._config, on_gpu=on_gpu)
        slow_reason = vllm_setup.no_columns(self._config, version)
        arguments = vllm_setup.engine_arguments(self._config, self._folder, on_gpu=on_gpu, columns=not slow_reason)
        self._loaded_version = 0
        self._tracks.clear()
        self._engine = await asyncio.get_running_loop().run_in_executor(self._starter, vllm_setup.make_engine, arguments, vllm_setup.devices(self._config, self._number) if on_gpu else "")
        # What was made so far lives as long as the engine: a full collection over it (hundreds of thousands of objects of torch, transformers
        # and vLLM) would hold up every stream each time. vLLM does the same in its own processes.
        gc.collect()
        gc.freeze()
        self._accounting = Accounting(self._engine) if slow_reason else Intake(self._engine, interval_s=self._config.delta_interval_s)
        logger.info("tokens leave vLLM %s", f"by its own way, an object a token: {slow_reason}" if slow_reason else "in columns, a step at a time")
        workers = sorted(await self._rpc("headrace_describe", timeout_s=60.0), key=lambda answer: answer["worker"])
        check_given(worker["device_uuid"] for worker in workers)
        if self._config.quantization and not all(worker["quantized"] for worker in workers):
            raise ValueError(f"quantization={self._config.quantization}: this build of vLLM takes it and leaves the weights as they are; name another of its online ways, or leave it out")
        await self._choose_apply("loader" if self._config.quantization else self._config.apply)
        tokens = await asyncio.to_thread(Tokens, self._folder)
        if without_text := tokens.without_text(self._engine.model_config.get_vocab_size()):
            await self._rpc("headrace_forbid", without_text, timeout_s=60.0)
        model_config = self._engine.model_config
        self._info = EngineInfo(
            name=f"vllm {version}",
            columns=not slow_reason,
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
        logger.info("updates are applied by %s", f"the engine's loader, if at all: {self.apply_reason}" if self.apply_reason else "copies into its parameters")

    async def stop(self) -> None:
        engine, accounting, self._engine, self._accounting = self._engine, self._accounting, None, None
        if engine is not None:
            assert accounting is not None
            self._give_up(engine, accounting)
            if engine.output_handler is not None:
                engine.output_handler.cancel()  # else it reports the end of its process as a failure
            await asyncio.get_running_loop().run_in_executor(self._starter, vllm_setup.shut_down, engine)
            engine.shutdown = lambda *_, **__: None  # its destructor calls it again, at a time when the interpreter has taken the modules away

    def _give_up(self, engine: Any, accounting: Accounting) -> None:
        """Whoever waits for a token is told; nobody else would, once the engine's process is gone by our own doing."""
        accounting.fail(_STOPPED)
        engine.output_processor.propagate_error(EngineUnavailableError(_STOPPED))

    async def check(self) -> None:
        if self._engine is None or self._engine.errored:
            raise EngineUnavailableError("the engine's process is not running")

    def stats(self) -> EngineStats:
        """Of the scheduler, what it told at its newest step."""
        stats, accounting = self._meter.stats(), self._accounting
        if accounting is None:
            return stats
        stats = replace(stats, num_drawn=accounting.num_arrived)
        if (seen := accounting.scheduler) is None:
            return stats
        return replace(
            stats, num_waiting=seen.num_waiting_reqs, kv_use=seen.kv_cache_usage, num_preempted=accounting.num_preempted,
            num_prefix_tokens=accounting.num_prefix_tokens, num_prefix_hit_tokens=accounting.num_prefix_hit_tokens,
        )  # fmt: skip

    @property
    def latency(self) -> Latency:
        return self._accounting.latency if self._accounting is not None else Latency()

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
        num_drawn = 0
        try:
            async with aclosing(self._parts(list(prompt_ids), sampling, inner_id, stream)) as parts:
                async for ids, logprobs, finish in parts:
                    num_drawn += len(ids)
                    self._meter.num_tokens += len(ids)
                    spans = self._tracks[inner_id].spans(num_drawn) if finish else ()
                    yield Delta(token_ids=ids, logprobs=logprobs, finish=finish, spans=spans)
        finally:
            self._meter.end()
            self._tracks.pop(inner_id, None)
            accounting.forget(inner_id)

    def _parts(self, prompt_ids: list[int], sampling: SamplingSpec, inner_id: str, stream: bool) -> AsyncGenerator[Part, None]:
        parameters = vllm_setup.request_parameters(sampling, self.info.max_model_len - len(prompt_ids), stream)
        prompt = {"prompt_token_ids": prompt_ids, "cache_salt": f"v{self._loaded_version}"}
        if isinstance(self._accounting, Intake):
            return by_columns(self._accounting, prompt, parameters, inner_id, streaming=stream)
        return by_objects(self._engine, prompt, parameters, inner_id)

    def drawn(self, request_id: str, start: int = 0) -> Delta | None:
        accounting = self._accounting
        inner_id = next((name for name in self._tracks if name.rpartition("#")[0] == request_id), None)
        if inner_id is None or accounting is None or (seen := accounting.seen(inner_id, start)) is None:
            return None
        ids, logprobs = seen
        return Delta(token_ids=ids, logprobs=logprobs, spans=self._tracks[inner_id].spans(start + len(ids)))

    async def abort(self, request_id: str) -> None:
        for inner_id in [name for name in self._tracks if name.rpartition("#")[0] == request_id]:
            if isinstance(self._accounting, Intake):
                await self._accounting.abort(inner_id)
            else:
                await self._engine.abort(inner_id)
