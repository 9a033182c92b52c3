"""How many samples of a batch were punished for their length, and how many trained nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from learner.trainer.credit import penalties_of
from learner.trainer.objective import Objective
from learner.trainer.table import Entry


def shaping_of(table: Sequence[Entry], objective: Objective) -> dict[str, Any]:
    """Of usable samples: overlong_punished (number), overlong_penalty_mean (over those, in rewards; 0 without any), masked_truncated (number)."""
    usable = [entry for entry in table if entry.usable]
    penalties: list[float] = []
    for name in dict.fromkeys(entry.data_set for entry in usable):
        one = objective.of(name)
        if one.config.overlong is not None:
            penalties += penalties_of([entry for entry in usable if entry.data_set == name], one.config.overlong, one.max_new_tokens).tolist()
    punished = [value for value in penalties if value]
    return {
        "overlong_punished": len(punished),
        "overlong_penalty_mean": sum(punished) / len(punished) if punished else 0.0,
        "masked_truncated": sum(objective.masks(entry) for entry in usable),
    }
