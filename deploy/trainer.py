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

from deploy.launch import launch as launch_run
from deploy.schema import RunFile, load, parse
from learner.presets import merged

SCORER = "reward"
_SUMS = Path(__file__).parent / "templates" / "sums.jsonl"


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
        placement: Mapping[str, Any] | None = None,
        **learner: Any,
    ) -> None:
        face = type(self).__name__
        for name, value in (("data", learner.get("data")), ("rollout", rollout), ("reward_server", reward_server), ("placement", placement)):
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"{face}: {name}={value!r} must be a mapping of settings, for instance {{'replicas': 2}} for rollout")
        if "scorers" in (reward_server or {}):
            raise ValueError(f"{face}: reward_server={{'scorers': …}} and reward={reward!r} both name scorers; reward is the one that scores, and a run file takes several (docs/rewards.md)")
        data = {**(learner.pop("data", None) or {}), **({} if prompts is None else {"prompts": str(prompts)})}
        content = {
            "run_dir": str(run_dir or Path("runs") / time.strftime("run-%Y%m%d-%H%M%S")),
            "model": str(model),
            **({"placement": dict(placement)} if placement else {}),
            "learner": {**learner, "data": data},
            "rollout": dict(rollout or {}),
            "reward": {**(reward_server or {}), "scorers": [{"name": SCORER, "use": scorer_path(reward)}]},
        }
        self.run = parse(content, where=face)

    def train(self) -> Result:
        """Runs to the end; an existing run_dir is resumed. Raises RuntimeError when the run fails, ValueError for a mistake found only then."""
        return _run(self.run)


class PPOTrainer(GRPOTrainer):
    """PPO with a critic (preset `ppo`, docs/learner.md), sized by four numbers.

    `batch_size` samples a step, of `group_size` (by default 4, or 1 where 4 does not divide) for each prompt; `sequence_length` tokens at most for prompt and
    completion together, half of them for either; `num_gpus` 0 is a CPU, 1 is shared by learner and rollout, of more the learner's ranks get one half. Without `prompts`
    and `reward` it learns the sums of deploy/templates/sums.jsonl, scored by the last number of an answer. Everything else as GRPOTrainer, on top of these settings.

    Example: `PPOTrainer(model_name="models/smollm2", num_gpus=0, batch_size=64, sequence_length=256, steps=50).train()`
    """

    def __init__(
        self, *, model_name: str | Path, num_gpus: int = 0, batch_size: int = 64, sequence_length: int = 1024,
        prompts: str | Path | None = None, reward: str | Callable[..., Any] | None = None, rollout: Mapping[str, Any] | None = None, placement: Mapping[str, Any] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        if (prompts is None) != (reward is None):
            raise ValueError(f"PPOTrainer: prompts={prompts!r}, reward={reward!r}: data and what scores its answers go together; give both, or neither for the built-in sums")
        for name, value, least in (("num_gpus", num_gpus, 0), ("batch_size", batch_size, 1), ("sequence_length", sequence_length, 2)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"PPOTrainer: {name}={value!r} must be a whole number of at least {least}")
        for name in ("sampling", "trainer", "data", "filter"):
            if not isinstance(more.get(name) or {}, Mapping):
                raise ValueError(f"PPOTrainer: {name}={more[name]!r} must be a mapping of settings")
        group_size = int((more.get("sampling") or {}).get("group_size") or (4 if batch_size % 4 == 0 else 1))
        if batch_size % group_size:
            raise ValueError(f"PPOTrainer: batch_size={batch_size} is no multiple of sampling.group_size={group_size}; use one that is")
        sized = _sized(num_gpus, batch_size, sequence_length, group_size)
        settings = {name: merged(value, more.get(name) or {}) if isinstance(value, Mapping) else more.get(name, value) for name, value in sized["learner"].items()}
        algorithm = merged({"name": "ppo"}, more.pop("algorithm", None) or {})
        super().__init__(
            model=model_name, prompts=prompts or _SUMS, reward=reward or "last_number", rollout=merged(sized["rollout"], rollout or {}), placement=placement or sized["placement"],
            algorithm=algorithm, **{**more, **settings},
        )  # fmt: skip


def _sized(num_gpus: int, batch_size: int, sequence_length: int, group_size: int) -> dict[str, dict[str, Any]]:
    """Sections of a run file for so many GPUs, samples and tokens."""
    cuda, ranks = num_gpus > 0, max(1, num_gpus // 2)
    completion = max(1, sequence_length // 2)
    dtypes = {"compute_dtype": "bfloat16", "served_dtype": "bfloat16"} if cuda else {}
    learner: dict[str, Any] = {
        "groups_per_step": batch_size // group_size,
        "sampling": {"group_size": group_size, "max_new_tokens": completion},
        "data": {"max_prompt_tokens": sequence_length - completion},
        "filter": {"min_usable": 1},
        "trainer": {"device": "cuda" if cuda else "cpu", "ranks": ranks, "row_tokens": max(sequence_length, 16_384 if cuda else 2048), **dtypes},
    }
    rollout: dict[str, Any] = {"max_model_len": sequence_length, **({"dtype": "bfloat16"} if cuda else {}), **({"gpu_memory_fraction": 0.3} if num_gpus == 1 else {})}
    if num_gpus > 1:
        rollout["replicas"] = num_gpus - ranks
    placement = {"learner_gpus": list(range(ranks)), "rollout_gpus": [[gpu] for gpu in range(ranks, num_gpus)] or [[0]]} if cuda else {}
    return {"learner": learner, "rollout": rollout, "placement": placement}


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
    outcome = launch_run(run, on_event=lambda text: print(text, file=sys.stderr))
    outcome.check()
    file = run.run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    steps, evaluations = ([line for line in lines if ("evaluation" in line) == wanted] for wanted in (False, True))
    return Result(run_dir=run.run_dir, model=run.run_dir / "model", metrics=tuple(steps), evaluations=tuple(evaluations))
