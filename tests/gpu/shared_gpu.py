"""One GPU, shared: an FSDP2 rank in bfloat16 and vLLM push and serve side by side. A script, not collected by pytest.

    python3 -m tests.gpu.shared_gpu OUT.json [--hidden 1024 --layers 6]

Starts the three services as a user would, keeps long requests in flight over at least three updates, and has every token's
log-prob evaluated by another process from the trainer's cuts under its own version, in float32 and in bfloat16. What bfloat16
alone does to these very tokens (transformers against itself) is the noise; the served log-probs may be no further off than it allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from deploy.models import tiny
from tests.system.clients import Generated, stream_until
from tests.system.harness import ROOT, Run, running

NOISE_FACTOR = 1.5  # served against float32, as a multiple of transformers' bfloat16 against float32


def load_until(run: Run, num_steps: int, num_streams: int) -> list[Generated]:
    """Streams of 512 tokens until `num_steps` further steps are over."""
    stop, done = threading.Event(), []
    address = run.services["one"].address()

    async def load() -> None:
        over = asyncio.Event()
        prompts = [[65 + i % 26, 66, 67 + i // 26] for i in range(num_streams)]
        streams = asyncio.create_task(stream_until(address, prompts, over, max_new_tokens=512))
        while not stop.is_set() and not streams.done():
            await asyncio.sleep(0.05)
        over.set()
        done.extend(await streams)

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    try:
        run.wait_steps(len(run.metrics()) + num_steps, limit_s=240)
    finally:
        stop.set()
        thread.join(120)
    return done


def evaluated(run: Run, generated: list[Generated], dtype: str) -> list[float]:
    """Log-probs of all tokens, one after another, by another process from the cuts."""
    step_of = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}
    samples = [{"prompt": g.prompt, "completion": g.completion, "spans": [[step_of[v], a, b] for v, a, b in g.spans]} for g in generated]
    question, answer = run.folder / "question.json", run.folder / "answer.json"
    question.write_text(json.dumps({"model": str(run.model), "checkpoints": str(run.run_dir / "checkpoints"), "dtype": dtype, "samples": samples}))
    subprocess.run([sys.executable, "-m", "tests.system.fresh", str(question), str(answer), "--device", "cuda"], cwd=ROOT, check=True, timeout=300)
    return [value for values in json.loads(answer.read_text())["logprobs"] for value in values]


def mean_difference(some: list[float], others: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / max(1, len(some))


def measure(folder: Path, model: Path) -> dict[str, Any]:
    with running(folder, model) as run:
        run.start_reward()
        started = time.monotonic()
        run.start_learner(
            groups_per_step=4, sampling={"group_size": 8, "max_new_tokens": 128}, optimizer={"lr": 1e-5}, checkpoint={"every_steps": 1, "keep": 1000},
            trainer={"device": "cuda", "ranks": 1, "compute_dtype": "bfloat16", "served_dtype": "bfloat16", "threads": 4},
            push={"collective_timeout_s": 30, "deadline_s": 60, "prepare_s": 10, "bucket_bytes": 64 << 20}, lease={"silence_s": 20},
        )
        run.start_rollout("one", engine="vllm", dtype="bfloat16", max_model_len=1024, max_num_seqs=128, gpu_memory_fraction=0.4, threads=4, env={"OMP_NUM_THREADS": "4"})
        run.wait_steps(2, limit_s=300)
        ready_s = time.monotonic() - started
        generated = load_until(run, num_steps=6, num_streams=16)
        mixed = [g for g in generated if len(g.spans) > 1]
        for service in run.services.values():
            service.kill()  # no more cuts while the old ones are read
        step_of, saved = {line["version"]: line["step"] for line in run.metrics()} | {1: 0}, run.saved_steps()
        chosen = [g for g in mixed if all(step_of.get(version, -1) in saved for version, _, _ in g.spans)][:16]
        served = [value for g in chosen for value in g.logprobs]
        exact, rounded = evaluated(run, chosen, "float32"), evaluated(run, chosen, "bfloat16")
        lines = run.metrics()
        return {
            "ready_s": ready_s, "steps": len(lines), "requests": len(generated), "requests_over_updates": len(mixed), "checked_tokens": len(served),
            "versions_in_one_request_max": max((len(g.spans) for g in generated), default=0), "full_length": all(len(g.completion) == 512 for g in generated),
            "served_vs_float32": mean_difference(served, exact), "served_vs_bfloat16": mean_difference(served, rounded),
            "noise_bfloat16_vs_float32": mean_difference(rounded, exact), "push": lines[-1]["push"], "transports": sorted({json.loads(line)["transport"] for line in (run.run_dir / "pushes.jsonl").read_text().splitlines()}),
            "mismatch": [line["mismatch"] for line in lines[-3:]], "seconds": lines[-1]["seconds"],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny(folder / "model", hidden=args.hidden, layers=args.layers, heads=args.hidden // 64, kv_heads=args.hidden // 128, head_dim=64, init_std=0.02)
        result = measure(folder, Path(model))
    result["passed"] = bool(result["requests_over_updates"]) and result["versions_in_one_request_max"] >= 3 and result["full_length"] and result["served_vs_float32"] <= NOISE_FACTOR * result["noise_bfloat16_vs_float32"]
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
