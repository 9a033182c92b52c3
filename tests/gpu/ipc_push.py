"""Learner and replica on one GPU: weights by CUDA IPC into a real vLLM engine. A script, not collected by pytest.

    python3 -m tests.gpu.ipc_push [--eager] [--hidden 1024 --layers 28] [--transport ipc|gloo]      prints one JSON object

Five versions go over while nothing, then while 64 requests are in flight; after each the engine's log-probs are held against the
trainer process's own forward pass. How an update is applied (copies or loader, and why), the pieces of each pause, and both ways
side by side. Then the trainer is killed in the middle of a transfer: an error in time, and the old version goes on serving.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks._update_scene import Scene, scene
from benchmarks._update_trainer import spec_of
from deploy.models import tiny
from rollout_server.engine import SamplingSpec
from rollout_server.vllm_engine import VllmEngine

NOISE = 0.06  # mean absolute difference of bfloat16 log-probs, engine against transformers; other weights differ by more than 0.2


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


async def difference(made: Scene, name: str) -> float:
    """Mean absolute difference of a fresh sample's log-probs from the trainer's."""
    prompt = [random.randrange(3, 200) for _ in range(32)]
    ids, values, _ = await drawn(made.engine, prompt, 64, name)
    theirs = (await made.trainer.ask("logprobs " + ",".join(map(str, prompt + ids))))["logprobs"][-len(ids) :]
    return sum(abs(a - b) for a, b in zip(values, theirs, strict=True)) / len(ids)


async def part(made: Scene, label: str) -> dict[str, Any]:
    """Updates with nothing in flight, then with 64 requests."""
    before = await difference(made, f"{label}-before")
    said(label, f"log-probs differ by {before:.4f} before any update")
    idle, busy, off = [], [], []
    for seed in range(3):
        idle.append(await made.update(seed))
        said(label, f"idle update {seed}: {idle[-1].times}")
        off.append(await difference(made, f"{label}-{seed}"))
    running = [asyncio.create_task(drawn(made.engine, [random.randrange(3, 200) for _ in range(64)], 500, f"{label}-flight-{i}")) for i in range(64)]
    await asyncio.sleep(0.5)
    for seed in range(3, 8):
        busy.append(await made.update(seed))
        said(label, f"busy update {seed}: {busy[-1].times}")
        await asyncio.sleep(0.3)
    off.append(await difference(made, f"{label}-last"))
    said(label, "waits for what is in flight")
    done = await asyncio.gather(*running)
    pieces = {name: round(1e3 * statistics.median(u.times.pieces_s[name] for u in busy), 3) for name in busy[0].times.pieces_s}
    return {
        "applied_by": "copies" if not made.engine.apply_reason else f"loader: {made.engine.apply_reason}", "bytes": idle[0].num_bytes, "logprob_difference_before_any": before, "logprob_difference_max": max(off), "idle_pause_ms": [round(1e3 * u.times.pause_s, 2) for u in idle],
        "busy_pause_ms": [round(1e3 * u.times.pause_s, 2) for u in busy], "busy_pieces_ms_median": pieces, "transfer_ms": [round(1e3 * u.transfer_s, 1) for u in [*idle, *busy]],
        "snapshot_ms": round(1e3 * statistics.median(u.write_s for u in [*idle, *busy]), 1), "all_full_length": all(len(ids) == 500 for ids, _, _ in done), "versions_in_one_request_max": max(spans for _, _, spans in done),
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


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    random.seed(1)
    result: dict[str, Any] = {"transport": options.transport, "hidden": options.hidden, "layers": options.layers}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        model = tiny(Path(name) / "model", architecture="qwen3", hidden=options.hidden, layers=options.layers, heads=options.hidden // 64, kv_heads=options.hidden // 128, head_dim=64, init_std=0.02)
        settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 128, "gpu_memory_fraction": 0.4, "in_flight": "keep", "enforce_eager": options.eager}
        async with scene(model, Path(root), transport=options.transport, device=options.device, **settings) as made:
            result["auto"] = await part(made, "auto")
            await made.engine.use_loader()
            result["loader"] = await part(made, "loader")
            result.update(await killed(made))
    good = [result[apply]["logprob_difference_max"] <= NOISE and result[apply]["all_full_length"] for apply in ("auto", "loader")]
    result["passed"] = all(good) and result["auto"]["applied_by"] == "copies" and bool(result["killed_error"]) and result["killed_seconds"] < 9 and result["serves_after"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--transport", default="ipc")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="no compilation: a quicker start")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
