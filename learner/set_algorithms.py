"""What one data set of a run trains with: the run's algorithm, or a preset, with the set's own settings on top (docs/data.md).

One step has one update, so some things are the whole run's: how token losses become one number, where ratios start from, and which
second models there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from learner.algorithm_config import AlgorithmConfig, KlConfig
from learner.presets import merged
from protos.mistakes import of_validation

RUN_WIDE = ("aggregation", "norm_tokens", "old_policy")
_SECOND_MODEL = ("reference", "model", "every_steps", "decay", "offload")


def algorithm_of_set(run: AlgorithmConfig, own: Mapping[str, Any], *, key: str) -> AlgorithmConfig:
    """key: where `own` stands, for messages. Raises ValueError, one line, for what is none, or would have to be the whole run's."""
    if not own:
        return run
    given = own if "name" in own else merged(run.model_dump(), own)
    try:
        made = AlgorithmConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError("; ".join(of_validation(error.errors(), key))) from None
    for name in RUN_WIDE:
        if getattr(made, name) != getattr(run, name):
            raise ValueError(f"{key}.{name}={getattr(made, name)} differs from algorithm.{name}={getattr(run, name)}: a step has one of it for all its data sets; set it in algorithm, or say {name}: {getattr(run, name)} here too")
    if made.teacher is not None and made.teacher != run.teacher:
        raise ValueError(f"{key}.teacher={made.teacher.model!r}: the run has one teacher for all its data sets or none; set it in algorithm")
    if (made.advantage.kind == "gae") != (run.advantage.kind == "gae"):
        raise ValueError(f"{key}.advantage.kind={made.advantage.kind} with algorithm.advantage.kind={run.advantage.kind}: a critic values the samples of every data set or of none; use gae everywhere or nowhere")
    _check_kl(made.kl, run.kl, key)
    return made


def _check_kl(own: KlConfig | None, run: KlConfig | None, key: str) -> None:
    if own is not None and own.adaptive is not None and own.adaptive != (run and run.adaptive):
        raise ValueError(f"{key}.kl.adaptive differs from algorithm.kl.adaptive: one factor follows the KL of the whole run; set it in algorithm.kl, or leave it out here")
    if own is None or own.reference == "behaviour":
        return
    for name in _SECOND_MODEL:
        ours, theirs = getattr(own, name), getattr(run, name, None)
        if ours != theirs:
            raise ValueError(f"{key}.kl.{name}={ours} differs from algorithm.kl.{name}={theirs}: the run has one reference for all its data sets; set it in algorithm.kl, or use reference=behaviour")
