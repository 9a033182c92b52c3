"""exact: the completion is the gold answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reward_server.outcome import Unscored
from reward_server.scorers.gold import gold_texts


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    field: str = "answer",
    ignore_case: bool = False,
    ignore_space: bool = True,
) -> float | Unscored:
    """1 when the completion equals the record's answer (or one of a list), else 0.

    Example: answer `New York`, completion ` New  York`: 1. Source: exact match as in SQuAD (Rajpurkar et al. 2016, section 6.1), without
    its dropping of articles and punctuation. Limits: strings; `11` and `11.0` differ (last_number, math).
    """
    gold = gold_texts(fields, field)
    if isinstance(gold, Unscored):
        return gold
    given = _normal(completion, ignore_case, ignore_space)
    return float(any(given == _normal(text, ignore_case, ignore_space) for text in gold))


def _normal(text: str, ignore_case: bool, ignore_space: bool) -> str:
    """Space at both ends dropped and runs of it made one, case folded, as asked."""
    text = " ".join(text.split()) if ignore_space else text
    return text.casefold() if ignore_case else text
