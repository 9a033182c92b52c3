"""`headrace smoke --preset calculator`: a tiny model learns to ask a calculator and to answer what it says, several turns a sample.

Held-out sums are asked by the run's own evaluation, through the same environment, before training and after each ten steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from deploy.demo import sums
from deploy.launch import launch
from deploy.progress import read_all, surviving
from deploy.report import write as write_report
from deploy.schema import load
from deploy.services import write_atomically
from learner.gateway.rendering import stop_ids
from learner.presets import PRESETS

NUM_HELD_OUT = 200
NUM_TRAINING = 4000
STEPS = 40
EVERY_STEPS = 10
ROOM_TOKENS = 24  # beyond the prompt: six and an end, four, three and an end, and what a wrong turn takes


def run(run_dir: Path, *, seed: int, on_event: Callable[[str], None], algorithm: str = "grpo", engine: str = "vllm") -> dict[str, Any]:
    """From nothing to the result line; a finished folder gives its result again, an interrupted one goes on.

    Raises RuntimeError when a service fails for good, ValueError for an unknown preset of algorithms.
    """
    result = run_dir / "result.json"
    if result.is_file():
        on_event(f"{run_dir} holds a finished run; give another --run-dir for a new one")
        return dict(json.loads(result.read_text()))
    if algorithm not in PRESETS:
        raise ValueError(f"algorithm {algorithm} is not a preset; choose one of {', '.join(PRESETS)}")
    began = time.monotonic()
    if not (run_dir / "run.yaml").is_file():
        prepare(run_dir, seed, algorithm, engine, on_event)
    launch(load(run_dir / "run.yaml"), on_event=on_event).check()
    summary = summarize(run_dir, minutes=(time.monotonic() - began) / 60)
    write_atomically(result, json.dumps(summary) + "\n")
    on_event(f"report: {write_report(run_dir)}")
    return summary


def prepare(run_dir: Path, seed: int, algorithm: str, engine: str, on_event: Callable[[str], None]) -> None:
    """Model, prompts, and last the run file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    held_out = sums.held_out(NUM_HELD_OUT, seed=seed)
    pairs = sums.training(NUM_TRAINING, seed=seed, excluded=held_out)
    for name, chosen in (("held-out", held_out), ("train", pairs)):
        write_atomically(run_dir / f"{name}.jsonl", "".join(json.dumps({"prompt": sums.prompt(pair), "answer": sums.answer(pair)}) + "\n" for pair in chosen))
    model = run_dir / "base"
    if not model.exists():
        on_event("model: a new one of 0.5 M parameters, with a little supervised training")
        make_model(model, pairs, seed)
    write_atomically(run_dir / "run.yaml", yaml.safe_dump(run_content(run_dir, model, seed, algorithm, engine), sort_keys=False))


def make_model(folder: Path, pairs: list[tuple[int, int]], seed: int) -> None:
    """The tiny model, made in a process of its own, since that takes torch."""
    file = folder.with_suffix(".json")
    write_atomically(file, json.dumps(pairs))
    command = [sys.executable, "-m", "deploy.demo.tool_warm_up", str(folder), str(seed), str(file)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if made.returncode:
        raise RuntimeError(f"the tiny model could not be made: {made.stderr[-2000:]}")


def run_content(run_dir: Path, model: Path, seed: int, algorithm: str, engine: str) -> dict[str, Any]:
    """The run file: sixteen groups of sixteen a step, played with a calculator. Rewards are the environment's; there is no reward server."""
    return {
        "run_dir": str(run_dir),
        "model": str(model),
        "learner": {
            "steps": STEPS,
            "seed": seed,
            "groups_per_step": 16,
            "data": {"prompts": str(run_dir / "train.jsonl"), "template": "raw", "max_prompt_tokens": 8},
            "sampling": {"group_size": 16, "max_new_tokens": ROOM_TOKENS, "stop_token_ids": list(stop_ids(model))},
            "staleness": {"max_staleness": 1},
            "algorithm": {"name": algorithm},
            **({"critic": {"optimizer": {"lr": 1e-3}}} if algorithm == "ppo" else {}),
            "optimizer": {"lr": 5e-4, "warmup_updates": 10},
            "trainer": {"device": "cpu", "threads": 1, "row_tokens": 1024},
            "checkpoint": {"every_steps": 20},
            "evaluation": {"prompts": str(run_dir / "held-out.jsonl"), "every_steps": EVERY_STEPS, "share": 1.0},
        },
        "rollout": {
            "engine": engine,
            "max_model_len": 64,
            "max_num_seqs": 128,
            "kv_cache_bytes": 32 << 20,
            "threads": 1,
            "seed": seed,
            "environments": [{"name": "calculator", "use": "calculator", "template": "raw", "max_turns": 3, "options": {"says": "{}>", "malformed": "?>"}}],
        },
    }


def curve_of(run_dir: Path) -> list[dict[str, Any]]:
    """Each finished evaluation: step, share of held-out sums answered right, its standard error."""
    lines = [line for line in read_all(run_dir / "metrics.jsonl") if "evaluation" in line]
    found = {line["step"]: line["evaluation"] for line in lines}
    return [{"step": step, "accuracy": found[step]["score"], "standard_error": found[step]["standard_error"]} for step in sorted(found)]


def summarize(run_dir: Path, *, minutes: float) -> dict[str, Any]:
    """The result line, with the curve."""
    curve = curve_of(run_dir)
    if not curve:
        raise RuntimeError(f"{run_dir} has no finished evaluation; see its logs")
    steps = [line for line in surviving(read_all(run_dir / "metrics.jsonl")) if "turns_mean" in line]
    return {
        "accuracy_before": round(curve[0]["accuracy"], 4),
        "accuracy_after": round(curve[-1]["accuracy"], 4),
        "standard_error_before": round(curve[0]["standard_error"], 4),
        "standard_error_after": round(curve[-1]["standard_error"], 4),
        "curve": [[point["step"], round(point["accuracy"], 4)] for point in curve],
        "turns_mean": [round(steps[0]["turns_mean"], 2), round(steps[-1]["turns_mean"], 2)] if steps else [],
        "minutes": round(minutes, 2),
        "steps": int(steps[-1]["step"]) if steps else 0,
        "run_dir": str(run_dir),
    }
