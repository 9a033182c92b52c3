"""Which cut is the best so far, by a metric that the trainer or an evaluation wrote into metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from learner.config import KeepBest
from learner.gateway import cuts

_log = logging.getLogger("headrace.learner.best")


def best_step(run_dir: Path, wanted: KeepBest | None) -> int | None:
    """Policy step of the marked cut with the best value; None where none has one, or none is wanted. Ties go to the newer one."""
    if wanted is None:
        return None
    values = values_by_step(run_dir / "metrics.jsonl", wanted.metric)
    scored = [(values[cut.policy_step], cut.policy_step) for cut in cuts.all_marked(run_dir / "checkpoints") if cut.policy_step in values]
    if not scored:
        _log.warning("checkpoint.keep_best: no cut has a value of %s in metrics.jsonl yet; only the newest are kept", wanted.metric)
        return None
    sign = 1 if wanted.mode == "max" else -1
    return max(scored, key=lambda pair: (sign * pair[0], pair[1]))[1]


def values_by_step(path: Path, metric: str) -> dict[int, float]:
    """Finite values of a dotted field by policy step; the last line of a step counts, so a rolled-back one does not."""
    values: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # a line that is being written, or was when the machine died
        value = _field(found, metric)
        if isinstance(found, dict) and isinstance(value, int | float) and math.isfinite(value):
            values[int(found.get("step", -1))] = float(value)
    return values


def _field(line: Any, metric: str) -> Any:
    if isinstance(line, dict) and metric in line:
        return line[metric]
    for name in metric.split("."):
        line = line.get(name) if isinstance(line, dict) else None
    return line
