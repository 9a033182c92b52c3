"""Learner and replica on one GPU: weights by CUDA IPC into a real vLLM engine. A script, not collected by pytest.

    python3 -m tests.gpu.ipc_push [--windows] [--out FILE] [--eager] [--hidden 1024 --layers 28] [--transport ipc|gloo]      prints one JSON object

Versions go over while nothing, then while requests are in flight; after each the engine's log-probs are held against a fresh forward pass
of transformers in the trainer's process, and once those of the version before (the control: other weights show). How an update is applied
(copies or loader, and why), the pieces of each pause, and both ways side by side. With --windows the pairs of benchmarks.update_pause are
measured in between, on the same engine. Last the trainer is killed in the middle of a transfer: an error in time, and the old version goes
on serving. What was found so far always lies in --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks import update_pause
from benchmarks._update_scene import Scene
from benchmarks._update_trainer import spec_of
from rollout_server.engine import SamplingSpec
from rollout_server.vllm_engine import VllmEngine

NUM_IN_FLIGHT, NEW_TOKENS = 32, 256


def said(label: str, what: str) -> None:
    """Progress, so that a run that is cut off has told how far it came."""
    print(f"[{time.monotonic():.1f}] {label}: {what}", file=sys.stderr, flush=True)


async def drawn(engine: VllmEngine, prompt: list[int], num: int, name: str) -> tuple[list[int], list[float], int]:
    """(ids, log-probs, versions) of one sample."""
    ids: list[int] = []
    values: list[float] = []
    spans = 0
    async with aclosing(engine.generate(prompt, SamplingSpec(temperature=1.0, max_new_tokens=num, seed=len(name)), name)) as deltas:
        async for delta in deltas:
            ids += delta.token_ids
            values += delta.logprobs
            spans = max(spans, len(delta.spans))
    return ids, values, spans


async def difference(made: Scene, sample: tuple[list[int], list[int], list[float]]) -> float:
    """Mean absolute difference of a sample's log-probs from those of the trainer's weights as they are now."""
    prompt, ids, values = sample
    theirs = (await made.trainer.ask("logprobs " + ",".join(map(str, prompt + ids))))["logprobs"][-len(ids) :]
    return sum(abs(a - b) for a, b in zip(values, theirs, strict=True)) / len(ids)


async def fresh(made: Scene, name: str) -> tuple[list[int], list[int], list[float]]:
    """(prompt, ids, log-probs) of a sample drawn now."""
    prompt = [random.randrange(3, 200) for _ in range(32)]
    ids, values, _ = await drawn(made.engine, prompt, 64, name)
    return prompt, ids, values


async def part(made: Scene, label: str) -> dict[str, Any]:
    """Updates with nothing in flight, then with requests."""
    old = await fresh(made, f"{label}-before")
    before = await difference(made, old)
    said(label, f"log-probs differ by {before:.4f} before any update")
    idle, busy, off = [], [], []
    for seed in range(2):
        idle.append(await made.update(seed))
        off.append(await difference(made, await fresh(made, f"{label}-{seed}")))
        said(label, f"idle update {seed}: {idle[-1].times}; log-probs differ by {off[-1]:.4f}")
    control = await difference(made, old)
    said(label, f"those of two versions ago differ by {control:.4f}")
    running = [asyncio.create_task(drawn(made.engine, [random.randrange(3, 200) for _ in range(64)], NEW_TOKENS, f"{label}-flight-{i}")) for i in range(NUM_IN_FLIGHT)]
    await asyncio.sleep(0.3)
    for seed in range(2, 5):
        busy.append(await made.update(seed))
        said(label, f"busy update {seed}: {busy[-1].times}")
    off.append(await difference(made, await fresh(made, f"{label}-last")))
    said(label, f"log-probs differ by {off[-1]:.4f}; waits for what is in flight")
    done = await asyncio.gather(*running)
    pieces = {name: round(1e3 * statistics.median(u.times.pieces_s[name] for u in busy), 3) for name in busy[0].times.pieces_s}
    return {
        "applied_by": "copies" if not made.engine.apply_reason else f"loader: {made.engine.apply_reason}", "bytes": idle[0].num_bytes, "logprob_difference_before_any": before,
        "logprob_differences": off, "logprob_difference_of_older_weights": control, "idle_pause_ms": [round(1e3 * u.times.pause_s, 2) for u in idle],
        "busy_pause_ms": [round(1e3 * u.times.pause_s, 2) for u in busy], "busy_pieces_ms_median": pieces, "transfer_ms": [round(1e3 * u.transfer_s, 1) for u in [*idle, *busy]],
        "snapshot_ms": round(1e3 * statistics.median(u.write_s for u in [*idle, *busy]), 1), "all_full_length": all(len(ids) == NEW_TOKENS for ids, _, _ in done), "versions_in_one_request_max": max(spans for _, _, spans in done),
    }  # fmt: skip


async def killed(made: Scene) -> dict[str, Any]:
    """The trainer dies between announcing a version and sending it."""
    written = await made.trainer.ask("write 99")
    spec = spec_of(made.transport, written["store_port"], receiver_rank=1, key="killed")
    spec.collective_timeout_s = 5.0
    version, began = made.engine.loaded_version, time.monotonic()
    receiving = asyncio.create_task(made.engine.receive(spec.SerializeToString(), bytes.fromhex(written["manifest"]), 10.0))
    await asyncio.sleep(0.2)
    await made.trainer.stop()
    try:
        await receiving
        error = ""
    except Exception as failure:
        error = str(failure)
    seconds = time.monotonic() - began
    ids, _, _ = await drawn(made.engine, [5, 6, 7], 16, "after")
    return {"killed_error": error, "killed_seconds": seconds, "serves_after": len(ids) == 16 and made.engine.loaded_version == version}


def good(found: dict[str, Any]) -> bool:
    """Log-probs of the served weights agree with transformers, and those of other weights do not."""
    noise = update_pause.NOISE
    return max(found["logprob_differences"]) <= noise < found["logprob_difference_of_older_weights"] and bool(found["all_full_length"])


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    random.seed(1)
    result: dict[str, Any] = {"transport": options.transport, "hidden": options.hidden, "layers": options.layers}
    async with update_pause.half_a_gigabyte(options) as made:
        result["copies"] = await part(made, "copies")
        update_pause.keep(options.out, result)
        if options.windows:
            bars, pairs, notes = await update_pause.windows(made, options)
            result["update_pause"] = {"bars": [bar.to_json() for bar in bars], "pairs": pairs, "notes": notes}
            update_pause.keep(options.out, result)
        await made.engine.use_loader()
        result["loader"] = await part(made, "loader")
        update_pause.keep(options.out, result)
        result.update(await killed(made))
    result["passed"] = good(result["copies"]) and good(result["loader"]) and result["copies"]["applied_by"] == "copies" and bool(result["killed_error"]) and result["killed_seconds"] < 9 and result["serves_after"]
    return result


def main() -> None:
    parser = update_pause.arguments(argparse.ArgumentParser())
    parser.add_argument("--windows", action="store_true", help="the pairs of benchmarks.update_pause too, on this engine")
    parser.add_argument("--out", type=Path, default=None, help="a file that holds what was found so far, and last everything")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
