"""The held-out prompts of a run as token ids: read and rendered as the training prompts are, in file order."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from learner.config import LearnerConfig
from learner.data_config import ReplayConfig
from learner.gateway import catalog
from learner.gateway.catalog import Catalog

logger = logging.getLogger("headrace.learner.evaluation")


def load(config: LearnerConfig, folder: Path, cache: Path, *, training: Catalog) -> Catalog | None:
    """None where the run evaluates nothing. Blocks as `catalog.load` does. Raises ValueError for the user's mistakes."""
    evaluation = config.evaluation
    if evaluation is None:
        return None
    split = config.data.split if evaluation.split is None else evaluation.split
    data = config.data.model_copy(update={"prompts": evaluation.prompts, "split": split, "sets": {}, "curriculum": None, "replay": ReplayConfig()})
    sampling = config.sampling.model_copy(update={"max_new_tokens": evaluation.max_new_tokens or config.sampling.max_new_tokens})
    try:
        found = catalog.load(config.model_copy(update={"data": data, "sampling": sampling}), folder, cache)
    except ValueError as error:
        raise ValueError(f"evaluation.prompts={evaluation.prompts}: {error}") from error
    first = slice(0, evaluation.max_prompts)
    held_out = replace(found, prompts=found.prompts[first], ids=found.ids[first], max_new_tokens=found.max_new_tokens[first])
    if num_shared := len(set(held_out.ids) & set(training.ids)):
        logger.warning("%d of %d evaluation prompts are training prompts too: their scores say little of others", num_shared, len(held_out.ids))
    return held_out
