"""A run of MLflow, on a tracking server or in a database file of the run folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from learner.tracker_config import MlflowConfig

T = TypeVar("T")
METRICS_A_CALL, PARAMS_A_CALL, PARAM_CHARS = 1000, 100, 500  # what MLflow takes at most


class ToMlflow:
    """`reference` is MLflow's id of the run; kept, it lets a restart go on with it."""

    def __init__(self, config: MlflowConfig, *, uri: str, name: str, reference: str, settings: Mapping[str, str]) -> None:
        """reference: of an earlier life; empty: a new run is made."""
        self._client = MlflowClient(tracking_uri=uri)
        if reference:
            self.reference = reference
            self._client.set_terminated(reference, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(config.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        self.reference = str(self._client.create_run(number, run_name=name).info.run_id)
        for some in _batches(settings.items(), PARAMS_A_CALL):
            self._client.log_batch(self.reference, params=[Param(_name(key), value[:PARAM_CHARS]) for key, value in some])

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        for some in _batches(values.items(), METRICS_A_CALL):
            self._client.log_batch(self.reference, metrics=[Metric(_name(key), value, int(1000 * time_s), step) for key, value in some])

    def went_back(self, step: int) -> None:
        """MLflow keeps every point; the later one of a step is the newer by its time."""
        self._client.set_tag(self.reference, "rolled_back_to", str(step - 1))

    def close(self) -> None:
        self._client.set_terminated(self.reference, "FINISHED")


def _name(key: str) -> str:
    """MLflow takes letters, digits, and these."""
    return re.sub(r"[^\w\-. /]", "_", key)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while some := list(islice(left, size)):
        yield some
