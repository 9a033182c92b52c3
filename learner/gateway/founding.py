"""What a run is founded on: settings that its account, its prompt order and its sampled tokens rest on, and that a resumed run keeps."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from learner.config import LearnerConfig

FILE = "founding.json"
ADAPTIVE = "staleness.adaptive (lowest, highest)"
GREEDY = "data sets with advantage.kind=greedy_baseline"  # their groups have one sample more


def founding(config: LearnerConfig, base_weights_digest: str) -> dict[str, Any]:
    """Setting to value, as JSON keeps them."""
    data, sampling, staleness = config.data, config.sampling, config.staleness
    return {
        "digest of model": base_weights_digest,
        "sampling.group_size": sampling.group_size,
        "sampling.temperature": sampling.temperature,
        "groups_per_step": config.groups_per_step,
        "staleness.max_staleness": staleness.max_staleness,
        "staleness.window": staleness.window,
        "data.template": data.template,
        "data.system": data.system,
        "data.shuffle": data.shuffle,
        ADAPTIVE: [staleness.lowest, staleness.highest] if staleness.adaptive else None,
        "seed": config.seed,
        GREEDY: sorted(name or "data" for name in config.data.sources if config.has_baseline(name)),
        **{f"data.sets.{name}": [one.template, one.system, one.shuffle, one.group_size or sampling.group_size] for name, one in config.data.sets.items()},
    }


def check(config: LearnerConfig, wanted: dict[str, Any]) -> None:
    """Raises ValueError, one line, when the run folder holds a run that was founded otherwise. A folder without a run has nothing to say."""
    path = config.run_dir / FILE
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    kept = {GREEDY: [], ADAPTIVE: None, **kept} if kept else kept  # a run of before there were any
    changed = [f"{name}={wanted[name]!r}, was {kept[name]!r}" for name in wanted if name in kept and kept[name] != wanted[name]]
    if changed:
        raise ValueError(
            f"{config.run_dir} holds a run that began otherwise: {'; '.join(changed)}. Its account and its sampled tokens rest on these (model={config.model}); "
            "set them back, or use another run_dir"
        )


def keep(run_dir: Path, wanted: dict[str, Any]) -> None:
    """Written once, when the first prompts of a run are there."""
    part = run_dir / f"{FILE}.part"
    part.write_text(json.dumps(wanted, indent=2) + "\n")
    part.replace(run_dir / FILE)


def run_id_of(config: LearnerConfig) -> str:
    """The run's id: made at its first start and kept in the run folder. Raises ValueError when the folder holds another run."""
    path = config.run_dir / "run_id"
    kept = path.read_text().strip() if path.is_file() else ""
    if kept and config.run_id and kept != config.run_id:
        raise ValueError(f"run_id={config.run_id}, but {config.run_dir} holds run {kept}; use another run_dir, or leave run_id empty to go on with it")
    run_id = kept or config.run_id or uuid.uuid4().hex[:12]
    if run_id != kept:
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(run_id + "\n")
        part.replace(path)
    return run_id
