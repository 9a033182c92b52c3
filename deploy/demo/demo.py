"""`headrace demo`: SmolLM2-135M-Instruct learns to answer sums, measured on held-out questions before and after.

Most of what it learns is to answer at once and in digits; `--baselines` measures how much of the gain that explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from deploy.demo import task
from deploy.demo.evaluate import Question
from deploy.demo.session import Baseline, Lesson, Taught, teach
from deploy.launch import Backend
from deploy.report import write as write_report
from deploy.schema import RunFile, load, parse
from deploy.services import write_atomically
from learner.gateway.rendering import stop_ids

MODEL = Path("models/smollm2")
NUM_HELD_OUT = 300
NUM_TRAINING = 6000
MAX_NEW_TOKENS = 12
SCORER = "answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says.

    Example: `Options(run_dir=Path("runs/demo"), control="none", baselines=False, max_minutes=7.0, seed=0)`
    """

    run_dir: Path
    control: str  # none, shuffled-rewards, zero-lr, ignored-pushes
    baselines: bool
    max_minutes: float  # of training
    seed: int
    backend: Backend = "local"


def run(options: Options, *, on_event: Callable[[str], None]) -> dict[str, Any]:
    """The demo from its first to its last byte; what the last line of its output says.

    A run folder that holds an interrupted demo is taken up where it stopped, with the options it began with.
    Raises ValueError for a user's mistake, RuntimeError when a service fails for good.
    """
    result = options.run_dir / "result.json"
    if result.is_file():
        on_event(f"{options.run_dir} holds a finished demo; give another --run-dir for a new one")
        return dict(json.loads(result.read_text()))
    file = options.run_dir / "run.yaml"
    if not file.is_file():
        prepare(options, on_event)
    run_file = load(file)
    lesson = make_lesson(task.read_jsonl(options.run_dir / "held_out.jsonl"), run_file, baselines=options.baselines)
    taught = teach(run_file, lesson, on_event, options.backend)
    summary = summarize(taught, run_file.run_dir)
    write_atomically(result, json.dumps(summary) + "\n")
    on_event(f"report: {write_report(run_file.run_dir)}")
    return summary


def prepare(options: Options, on_event: Callable[[str], None]) -> None:
    """Model, data, task.json, and last the run file, whose presence says that the rest is whole."""
    on_event(f"model: {MODEL}")
    make_model(MODEL)
    held_out = task.held_out(NUM_HELD_OUT, seed=options.seed)
    task.write_jsonl(options.run_dir / "held_out.jsonl", held_out)
    task.write_jsonl(options.run_dir / "train.jsonl", task.training(NUM_TRAINING, seed=options.seed))
    stops = stop_ids(MODEL)
    described = task.describe(held_out[0], MODEL, seed=options.seed, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=stops)
    write_atomically(options.run_dir / "task.json", json.dumps(described, indent=2) + "\n")
    content = run_content(options, stops)
    parse(content, where="demo")
    write_atomically(options.run_dir / "run.yaml", yaml.safe_dump(content, sort_keys=False))


def make_model(folder: Path) -> None:
    """The Hugging Face folder, made in a process of its own, since that takes torch and a gigabyte of memory."""
    if (folder / "config.json").is_file():
        return
    program = "import sys; from pathlib import Path; from deploy.models import smollm2; smollm2(Path(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False, timeout=600)
    if made.returncode:
        raise ValueError(f"the model could not be made: {made.stderr.strip().splitlines()[-1]}")


def run_content(options: Options, stop_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The run file: eight groups of eight a step, only groups with signal, one step of staleness, two shared cores."""
    return {
        "run_dir": str(options.run_dir),
        "model": str(MODEL),
        "learner": {
            "steps": 40,
            "max_minutes": options.max_minutes,
            "seed": options.seed,
            "groups_per_step": 16,
            "scorer": SCORER,
            "control": "shuffled_rewards" if options.control == "shuffled-rewards" else "none",
            "data": {
                "prompts": str(options.run_dir / "train.jsonl"),
                "id_field": "id",
                "system": task.SYSTEM,
                "suffix": task.SUFFIX,
                "max_prompt_tokens": 128,
            },
            "sampling": {"group_size": 8, "max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": list(stop_token_ids)},
            "staleness": {"max_staleness": 1},
            "filter": {"zero_signal": False},  # groups without spread cost no training; kept, those that an update meets half-way are trained too
            "optimizer": {"lr": 0.0 if options.control == "zero-lr" else 1e-5, "warmup_updates": 2},
            "trainer": {"device": "cpu", "row_tokens": 2048, "share_prefix": True},
            "checkpoint": {"every_steps": 10},
        },
        "rollout": {
            "max_model_len": 256,
            "max_num_seqs": 16,  # two groups at once: sampling lasts about as long as training, so that some updates meet samples half-way
            "kv_cache_bytes": 512 << 20,
            "threads": 1,
            "seed": options.seed,
            "apply_updates": options.control != "ignored-pushes",
            "exit_when_finished": False,  # it answers the held-out questions afterwards
        },
        "reward": {"scorers": [{"name": SCORER, "use": "last_number"}]},
        **(two_machines() if options.backend == "ray" else {}),
    }


def two_machines() -> dict[str, Any]:
    """A cluster of two nodes on this machine, so that one of them can be lost."""
    nodes = [{"name": "here", "count": 2, "gpus_per_node": 0}]
    place = {"node_group": "here"}
    return {"cluster": {"node_groups": nodes, "ray": {"local_nodes": 2}}, "roles": {"actor": place, "rollout": place, "reward_model": place}}


def make_lesson(tasks: list[task.Task], run_file: RunFile, *, baselines: bool) -> Lesson:
    """The held-out questions in the form that is trained on, and the baselines' forms."""
    questions = tuple(Question(prompt=each.prompt, answer=each.answer, messages=task.messages(each.prompt)) for each in tasks)
    begun = tuple(replace(question, begun=f"{each.expression} =") for question, each in zip(questions, tasks, strict=True))
    others = (
        Baseline(name="48-tokens", questions=questions, max_new_tokens=48),
        Baseline(name="begun", questions=begun, max_new_tokens=MAX_NEW_TOKENS),
    )
    return Lesson(
        questions=questions,
        scorer=SCORER,
        max_new_tokens=MAX_NEW_TOKENS,
        stop_token_ids=run_file.learner.sampling.stop_token_ids,
        baselines=others if baselines else (),
    )


def summarize(taught: Taught, run_dir: Path) -> dict[str, Any]:
    """The result line."""
    return {
        "accuracy_before": round(taught.before.accuracy, 4),
        "accuracy_after": round(taught.after.accuracy, 4),
        "standard_error_before": round(taught.before.standard_error, 4),
        "standard_error_after": round(taught.after.standard_error, 4),
        **{f"baseline_{name}": round(evaluation.accuracy, 4) for name, evaluation in taught.baselines.items()},
        "minutes": round(taught.minutes, 2),
        "steps": taught.steps,
        "run_dir": str(run_dir),
    }
