"""Drives one engine in this process: many requests at once, timed, with what they drew; and where the engine's process spends its time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rollout_server import vllm_setup
from rollout_server.config import RolloutConfig
from rollout_server.engine import SamplingSpec
from rollout_server.vllm_engine import VllmEngine

Sample = tuple[list[int], list[int], list[float]]  # prompt ids, completion ids, log-probs of the completion
Draw = Callable[[int, list[int]], Awaitable[Sample]]  # (index, prompt ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One burst of requests. Example: Timed(seconds=2.0, num_tokens=131072, num_steps=260, samples=[...]).tokens_per_s is 65536."""

    seconds: float
    num_tokens: int
    num_steps: int  # engine steps that brought tokens
    samples: list[Sample]  # empty log-probs where none were asked for

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def to_json(self) -> dict[str, float]:
        steps = max(self.num_steps, 1)
        return {"tokens_per_s": round(self.tokens_per_s, 1), "seconds": round(self.seconds, 3), "steps": self.num_steps, "tokens_per_step": round(self.num_tokens / steps, 1), "ms_per_step": round(1000 * self.seconds / steps, 3)}


@asynccontextmanager
async def running(config: RolloutConfig, folder: Path) -> AsyncIterator[VllmEngine]:
    """The engine of a rollout server, with a profiler in its worker."""
    original = vllm_setup.engine_arguments

    def with_profiler(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**original(*args, **kwargs), "worker_extension_cls": "benchmarks._rollout_worker.ProfiledExtension"}

    engine = VllmEngine(config, folder)
    with mock.patch.object(vllm_setup, "engine_arguments", with_profiler):
        await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def burst(draw: Draw, prompts: Sequence[list[int]], engine: VllmEngine) -> Timed:
    """All prompts at once."""
    accounting: Any = engine._accounting
    steps, began_s = accounting.num_steps, time.perf_counter()
    samples = await asyncio.gather(*[draw(index, prompt) for index, prompt in enumerate(prompts)])
    seconds = time.perf_counter() - began_s
    return Timed(seconds=seconds, num_tokens=sum(len(ids) for _, ids, _ in samples), num_steps=accounting.num_steps - steps, samples=list(samples))


def by_seam(engine: VllmEngine, new_tokens: int, seed: int, *, stream: bool = False) -> Draw:
    """As the servicer and the actor draw."""

    async def draw(index: int, prompt: list[int]) -> Sample:
        spec = SamplingSpec(temperature=1.0, max_new_tokens=new_tokens, seed=seed + index)
        ids: list[int] = []
        logprobs: list[float] = []
        async with aclosing(engine.generate(prompt, spec, f"{seed}/{index}", stream=stream)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
                logprobs += delta.logprobs
        return prompt, ids, logprobs

    return draw


def by_vllm(engine: VllmEngine, new_tokens: int, seed: int, *, logprobs: bool) -> Draw:
    """As a user of AsyncLLM would: whole completions only, with the sampled tokens' log-probs or bare."""

    async def draw(index: int, prompt: list[int]) -> Sample:
        parameters = vllm_setup.request_parameters(SamplingSpec(temperature=1.0, max_new_tokens=new_tokens, seed=seed + index), new_tokens, stream=False)
        parameters.logprobs = 0 if logprobs else None
        async with aclosing(engine._engine.generate({"prompt_token_ids": prompt}, parameters, f"v{seed}/{index}")) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
        found = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)] if logprobs else []
        return prompt, list(completion.token_ids), found

    return draw


async def profile(engine: VllmEngine, work: Awaitable[Timed], *, num_lines: int = 30) -> dict[str, Any]:
    """What the thread that steps the engine does during `work`; slower than without."""
    await engine._rpc("headrace_profile_begin", timeout_s=60)
    timed = await work
    (found,) = await engine._rpc("headrace_profile_end", num_lines, timeout_s=60)
    return {**timed.to_json(), **found}


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process so far, by name and id, from /proc."""
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, fields = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        seconds[f"{name}/{task.name}"] = (int(fields[11]) + int(fields[12])) * tick_s
    return seconds


def busiest(before: dict[str, float], after: dict[str, float], seconds: float, *, count: int = 5) -> dict[str, float]:
    """Share of a core that the busiest threads took."""
    shares = {name: round((value - before.get(name, 0.0)) / seconds, 3) for name, value in after.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1])[:count])
