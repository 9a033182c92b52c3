"""Where a step of vLLM's engine goes, with its own way of handing tokens out and with columns (docs/rollout.md).

    python -m benchmarks.rollout_profile OUT.json [--shape 0.5b --concurrent 256,512 --tokens 256 --device cuda]

Two engines on one device, one after the other: with the fast path, then vLLM's own. Each is measured bare (no log-probs), by vLLM's own
objects and as the service draws; then the busiest threads of the engine's process and a profile of the one that steps; then the drawn
tokens' log-probs against transformers. The file is written again after every part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._rollout_drive import Draw, Timed, burst, busiest, by_seam, by_vllm, profile, running, thread_seconds
from benchmarks._rollout_models import SHAPES, prompts, random_model, transformers_logprobs, vocab_size_of
from rollout_server.config import RolloutConfig
from rollout_server.vllm_engine import VllmEngine

PROMPT_TOKENS = 64


class Out:
    """What is known so far, written after every part."""

    def __init__(self, path: Path) -> None:
        self.path, self.began_s = path, time.perf_counter()
        self.found: dict[str, Any] = {"at_s": {}}

    def __setitem__(self, key: str, value: Any) -> None:
        self.found[key] = value
        self.found["at_s"][key] = round(time.perf_counter() - self.began_s, 1)
        self.path.write_text(json.dumps(self.found, indent=1))
        sys.stderr.write(f"{self.found['at_s'][key]:6.1f} s {key} {json.dumps(value)[:200]}\n")


async def measured(engine: VllmEngine, table: Sequence[list[int]], options: argparse.Namespace) -> tuple[dict[str, Any], Timed]:
    """Each way twice over, the better one told; and the last burst of the service's way."""
    ways: dict[str, Callable[[int], Draw]] = {
        "seam": lambda seed: by_seam(engine, options.tokens, seed),
        "seam_deltas": lambda seed: by_seam(engine, options.tokens, seed, stream=True),
        "vllm_logprobs": lambda seed: by_vllm(engine, options.tokens, seed, logprobs=True),
        "vllm_bare": lambda seed: by_vllm(engine, options.tokens, seed, logprobs=False),
    }
    await burst(ways["seam"](7), table[:32], engine)  # shapes are compiled, caches filled
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for turn in range(options.turns):
        for name, way in ways.items():
            found[name].append(await burst(way(1000 * (turn + 1)), table, engine))
    return {name: max(timed, key=lambda t: t.tokens_per_s).to_json() for name, timed in found.items()}, found["seam"][-1]


async def of_engine(name: str, config: RolloutConfig, folder: Path, out: Out, options: argparse.Namespace) -> Timed | None:
    last = None
    async with running(config, folder) as engine:
        out[f"{name}_start"] = {"columns": engine.info.columns, "engine": engine.info.name}
        for concurrent in options.concurrent:
            table = prompts(vocab_size_of(folder), concurrent, PROMPT_TOKENS, seed=concurrent)
            out[f"{name}_{concurrent}"], last = await measured(engine, table, options)
        (pid,) = await engine._rpc("headrace_pid", timeout_s=60)
        for way, draw in (("seam", by_seam(engine, options.tokens, 5)), ("vllm_bare", by_vllm(engine, options.tokens, 5, logprobs=False))):
            before, mine = thread_seconds(pid), thread_seconds(os.getpid())
            timed = await burst(draw, table, engine)
            out[f"{name}_threads_{way}"] = {"engine": busiest(before, thread_seconds(pid), timed.seconds), "front": busiest(mine, thread_seconds(os.getpid()), timed.seconds)}
        out[f"{name}_profile_seam"] = await profile(engine, burst(by_seam(engine, options.tokens, 6), table, engine))
        if engine.info.columns:
            out[f"{name}_profile_vllm_bare"] = await profile(engine, burst(by_vllm(engine, options.tokens, 6, logprobs=False), table, engine))
    return last


def compared(folder: Path, timed: Timed, options: argparse.Namespace, dtype: torch.dtype) -> dict[str, float]:
    """Drawn log-probs against transformers in the same dtype: absolute differences in nat."""
    chosen = timed.samples[:: max(1, len(timed.samples) // 32)]
    truth = transformers_logprobs(folder, [(prompt, ids) for prompt, ids, _ in chosen], device=options.device, dtype=dtype)
    apart = [abs(a - b) for (_, _, ours), theirs in zip(chosen, truth, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return {"tokens": len(apart), "mean": statistics.fmean(apart), "largest": max(apart)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--concurrent", type=lambda text: [int(part) for part in text.split(",")], default=[256, 512])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    out, dtype = Out(options.out), torch.bfloat16 if options.device == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as root:
        folder = random_model(Path(root) / "model", options.shape, dtype=dtype, device=options.device)
        out["model"] = {"shape": options.shape, "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}
        values = {
            "model": str(folder), "dtype": str(dtype).removeprefix("torch."), "max_model_len": 1024, "max_num_seqs": max(options.concurrent), "gpu_memory_fraction": 0.5,
            "enforce_eager": options.eager or options.device == "cpu", "kv_cache_bytes": 256 << 20, "threads": 1 if options.device == "cpu" else 0,
        }  # fmt: skip
        for name, fast in (("columns", True), ("objects", False)):
            timed = await of_engine(name, RolloutConfig(**values, fast_path=fast), folder, out, options)
            if timed is not None:
                out[f"{name}_against_transformers"] = compared(folder, timed, options, dtype)


if __name__ == "__main__":
    asyncio.run(main())
