"""The Python face of a run: the same names as in the file, as keyword arguments."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.launch import launch_local
from deploy.schema import RunFile, load, parse

SCORER = "reward"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a finished run left.

    Example: `Result(run_dir=Path("runs/a"), model=Path("runs/a/model"), metrics=({"step": 1, ...}, ...))`
    """

    run_dir: Path
    model: Path  # Hugging Face folder
    metrics: tuple[dict[str, Any], ...]  # one a step, in order
    evaluations: tuple[dict[str, Any], ...] = ()  # one an evaluation beside training, in order


def launch(file: str | Path) -> Result:
    """Runs a run file to its end on this machine. Raises ValueError for mistakes in it, RuntimeError when the run fails."""
    return _run(load(Path(file)))


class GRPOTrainer:
    """A run built from keyword arguments.

    `reward` is a scorer: the name of a built-in, "module:function", or a function that can be imported by its
    module and name. `prompts`: a file, or None where `data` has several sets (docs/data.md). Every other keyword is a field of learner/config.py; `rollout` and `reward_server` take
    mappings with the fields of those services. Raises ValueError for contradictions, before anything starts.

    Example: `GRPOTrainer(model="models/smollm2", prompts="train.jsonl", reward="last_number", steps=50, sampling={"group_size": 8}, rollout={"replicas": 2})`
    """

    def __init__(
        self,
        *,
        model: str | Path,
        prompts: str | Path | None = None,
        reward: str | Callable[..., Any],
        run_dir: str | Path | None = None,
        rollout: Mapping[str, Any] | None = None,
        reward_server: Mapping[str, Any] | None = None,
        **learner: Any,
    ) -> None:
        for name, value in (("data", learner.get("data")), ("rollout", rollout), ("reward_server", reward_server)):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"GRPOTrainer: {name}={value!r} must be a mapping of settings, for instance {{'replicas': 2}} for rollout")
        data = {**(learner.pop("data", None) or {}), **({} if prompts is None else {"prompts": str(prompts)})}
        content = {
            "run_dir": str(run_dir or Path("runs") / time.strftime("run-%Y%m%d-%H%M%S")),
            "model": str(model),
            "learner": {**learner, "data": data},
            "rollout": dict(rollout or {}),
            "reward": {**(reward_server or {}), "scorers": [{"name": SCORER, "use": scorer_path(reward)}]},
        }
        self.run = parse(content, where="GRPOTrainer")

    def train(self) -> Result:
        """Runs to the end; an existing run_dir is resumed. Raises RuntimeError when the run fails, ValueError for a mistake found only then."""
        return _run(self.run)


def scorer_path(reward: str | Callable[..., Any]) -> str:
    """The scorer as another process can find it. Raises ValueError for a function that it cannot."""
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise ValueError(f"reward={reward!r} must be a scorer's name, 'module:function', or a function; give one of these")
    module, name = getattr(reward, "__module__", None) or "", getattr(reward, "__qualname__", type(reward).__qualname__)
    if module == "__main__" or "<" in name:
        raise ValueError(
            f"reward={name} of module {module}: scorers run in processes of their own, which import them by module and name; "
            "move the function to the top level of a module that can be imported, or pass 'module:function'"
        )
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not reward:
        raise ValueError(f"reward={module}:{name} names another object when imported: give the function the name it is found by")
    return f"{module}:{name}"


def _run(run: RunFile) -> Result:
    outcome = launch_local(run, on_event=lambda text: print(text, file=sys.stderr))
    outcome.check()
    file = run.run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps, evaluations = ([line for line in lines if ("evaluation" in line) == wanted] for wanted in (False, True))
    return Result(run_dir=run.run_dir, model=run.run_dir / "model", metrics=tuple(steps), evaluations=tuple(evaluations))
