"""Where a run's metrics go beside metrics.jsonl."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from learner.section import Section


class TensorboardConfig(Section):
    """Event files for TensorBoard (extra `tensorboard`)."""

    folder: str = Field("", description="empty: run_dir/tensorboard")


class WandbConfig(Section):
    """A run of Weights & Biases (extra `wandb`)."""

    project: str = Field("headrace", min_length=1)
    entity: str = Field("", description="empty: the account's own")
    name: str = Field("", description="empty: the run folder's name")
    mode: Literal["offline", "online"] = Field("offline", description="offline: files under run_dir/wandb, for `wandb sync`")


class MlflowConfig(Section):
    """A run of MLflow (extra `mlflow`)."""

    uri: str = Field("", description="of the tracking server; empty: a database file, run_dir/mlflow.db")
    experiment: str = Field("headrace", min_length=1)


class TrackersConfig(Section):
    """Each that is set gets every line of metrics.jsonl, in a process of its own (docs/operating.md)."""

    tensorboard: TensorboardConfig | None = None
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    limit_s: Annotated[float, Field(gt=0)] = Field(60.0, description="a tracker that takes longer for one line, or to begin, is dropped")

    def wanted(self) -> tuple[str, ...]:
        """Names of those that are set."""
        return tuple(name for name in ("tensorboard", "wandb", "mlflow") if getattr(self, name) is not None)
