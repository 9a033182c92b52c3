"""`headrace smoke`: all services, the real engine and a real learner on a 0.5 M model that sorts three digits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from deploy.demo import sorting
from deploy.demo.demo import summarize, two_machines
from deploy.demo.evaluate import Question
from deploy.demo.session import Lesson, teach
from deploy.launch import Backend
from deploy.report import write as write_report
from deploy.schema import RunFile, load
from deploy.services import write_atomically
from learner.gateway.rendering import stop_ids
from learner.presets import PRESETS

NUM_HELD_OUT = 200
NUM_TRAINING = 4000
SUPERVISED_STEPS = 20
MAX_NEW_TOKENS = sorting.NUM_DIGITS + 2
STEPS = 60
SCORER = "sorted"


def run(run_dir: Path, *, seed: int, on_event: Callable[[str], None], algorithm: str = "grpo", backend: Backend = "local") -> dict[str, Any]:
    """From nothing to the result line; a finished folder gives its result again, an interrupted one goes on.

    algorithm: name of a preset (learner/presets.py).

    Raises RuntimeError when a service fails for good.
    """
    result = run_dir / "result.json"
    if result.is_file():
        on_event(f"{run_dir} holds a finished run; give another --run-dir for a new one")
        return dict(json.loads(result.read_text()))
    digits = sorting.held_out(NUM_HELD_OUT, seed=seed)
    if algorithm not in PRESETS:
        raise ValueError(f"algorithm {algorithm} is not a preset; choose one of {', '.join(PRESETS)}")
    if not (run_dir / "run.yaml").is_file():
        prepare(run_dir, digits, seed, algorithm, on_event, backend)
    run_file = load(run_dir / "run.yaml")
    taught = teach(run_file, make_lesson(digits, run_file), on_event, backend)
    summary = summarize(taught, run_dir)
    write_atomically(result, json.dumps(summary) + "\n")
    on_event(f"report: {write_report(run_dir)}")
    return summary


def prepare(run_dir: Path, held_out: list[str], seed: int, algorithm: str, on_event: Callable[[str], None], backend: Backend = "local") -> None:
    """Model, prompts, and last the run file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    digits = sorting.training(NUM_TRAINING, seed=seed, excluded=held_out)
    lines = (json.dumps({"prompt": sorting.prompt(each), "answer": sorting.answer(each)}) for each in digits)
    write_atomically(run_dir / "train.jsonl", "".join(f"{line}\n" for line in lines))
    model = run_dir / "base"
    if not model.exists():
        on_event("model: a new one of 0.5 M parameters, with a little supervised training")
        make_model(model, digits, seed)
    write_atomically(run_dir / "run.yaml", yaml.safe_dump(run_content(run_dir, model, seed, algorithm, backend), sort_keys=False))


def make_model(folder: Path, digits: list[str], seed: int) -> None:
    """The tiny model, made in a process of its own, since that takes torch."""
    file = folder.with_suffix(".json")
    write_atomically(file, json.dumps(digits))
    command = [sys.executable, "-m", "deploy.demo.warm_up", str(folder), str(seed), str(SUPERVISED_STEPS), str(file)]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if made.returncode:
        raise RuntimeError(f"the tiny model could not be made: {made.stderr[-2000:]}")


def run_content(run_dir: Path, model: Path, seed: int, algorithm: str, backend: Backend = "local") -> dict[str, Any]:
    """The run file: sixteen groups of sixteen a step."""
    return {
        "run_dir": str(run_dir),
        "model": str(model),
        "learner": {
            "steps": STEPS,
            "max_minutes": 1.25,
            "seed": seed,
            "groups_per_step": 16,
            "scorer": SCORER,
            "data": {"prompts": str(run_dir / "train.jsonl"), "template": "raw", "max_prompt_tokens": 16},
            "sampling": {"group_size": 16, "max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": list(stop_ids(model))},
            "staleness": {"max_staleness": 1},
            "algorithm": {"name": algorithm},
            **({"critic": {"optimizer": {"lr": 1e-3}}} if algorithm == "ppo" else {}),  # as far as the actor's, a model this small learns fast
            "optimizer": {"lr": 5e-4, "warmup_updates": 10},
            "trainer": {"device": "cpu", "threads": 1, "row_tokens": 1024},
            "checkpoint": {"every_steps": 20},
        },
        "rollout": {
            "max_model_len": 64,
            "max_num_seqs": 128,
            "kv_cache_bytes": 32 << 20,
            "threads": 1,
            "seed": seed,
            "exit_when_finished": False,  # it answers the held-out questions afterwards
        },
        "reward": {"scorers": [{"name": SCORER, "use": "deploy.demo.sorting:score"}]},
        **(two_machines() if backend == "ray" else {}),
    }


def make_lesson(digits: list[str], run_file: RunFile) -> Lesson:
    """The held-out questions as raw text."""
    return Lesson(
        questions=tuple(Question(prompt=sorting.prompt(each), answer=sorting.answer(each)) for each in digits),
        scorer=SCORER,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_token_ids=run_file.learner.sampling.stop_token_ids,
    )
