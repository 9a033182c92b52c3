"""What a tracker is: the seam between a line of metrics.jsonl and somebody's library. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

LEFT_OUT = frozenset({"step", "time_s", "groups"})  # what a point is of, or is no number


class Tracker(Protocol):
    """Example: `tracker.log(3, {"reward_mean": 0.5}, time_s=1764592012.0)`. May raise and may block: its process bears both."""

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        """The values of one step, or of one evaluation."""

    def went_back(self, step: int) -> None:
        """The run was rolled back: this step and those after it are made again."""

    def close(self) -> None:
        """Everything that was logged is kept by then."""


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, those inside others by a path. Example: `{"seconds": {"total": 2.0}, "loss": None}` gives `{"seconds/total": 2.0}`"""
    return dict(_numbers("", {key: value for key, value in line.items() if key not in LEFT_OUT}))


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{path}/{key}" if path else str(key), inner)
    elif isinstance(value, bool | int | float) and math.isfinite(value):
        yield path, float(value)


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """A run's configuration, each field by its dotted path, without secrets' places. Example: `{"optimizer.lr": "1e-05"}`"""
    return dict(_settings("", {key: value for key, value in config.items() if key not in ("security", "trackers")}))


def _settings(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _settings(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, str(value)
