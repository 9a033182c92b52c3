"""A run of Weights & Biases. Its id is the run's own, so that a restart goes on with it (offline: `wandb sync` puts the pieces together)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb

from learner.tracker_config import WandbConfig

STEP = "policy_step"  # the axis of all points: W&B's own steps cannot go back, a run that is rolled back does


class ToWandb:
    """Example: `ToWandb(WandbConfig(), run_dir=run_dir, run_id="r1", settings={})`"""

    def __init__(self, config: WandbConfig, *, run_dir: Path, run_id: str, settings: Mapping[str, str]) -> None:
        self._run = wandb.init(
            project=config.project, entity=config.entity or None, name=config.name or run_dir.name, id=run_id, resume="allow", mode=config.mode, dir=run_dir, config=dict(settings),
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )  # fmt: skip
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        self._run.log({**values, STEP: step, "_timestamp": time_s})

    def went_back(self, step: int) -> None:
        """Points of a step that is made again lie over the earlier ones; a mark says where."""
        self._run.log({"rolled_back_to": step - 1, STEP: step})

    def close(self) -> None:
        self._run.finish()
