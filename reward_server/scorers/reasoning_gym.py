"""reasoning_gym: the data set's own judgement of an extracted answer (package reasoning-gym, Apache-2.0)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

from reward_server.outcome import Unscored
from reward_server.scorers.last_number import last_number

Extract = Literal["last_number", "first_line", "raw"]


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    dataset: str,
    entry: str = "entry",
    extract: Extract = "raw",
    threshold: float = 0.0,
) -> float | tuple[float, dict[str, float]] | Unscored:
    """score_answer(extracted answer, the record's entry); with a threshold 1 from there on and 0 below.

    Example: dataset `chain_sum`, extract `last_number`, entry answer `-4`, completion `4 - 1 - 7 = -4.`: 1. Source: the data set's own rule
    (Stojanovski et al. 2025, "Reasoning Gym"). Limits: tuples of an entry's metadata arrive as lists.
    """
    record = fields.get(entry, fields)
    if not isinstance(record, Mapping) or "answer" not in record:
        return Unscored(f'neither field {entry!r} nor the record itself holds the data set\'s entry with "answer"; the record has {sorted(fields)}')
    answer = _extracted(completion, extract)
    value = 0.0 if answer is None else float(_judge(dataset)(answer, {**record, "answer": _as_text(record["answer"])}))
    return value if threshold <= 0 else (float(value >= threshold), {"score_answer": value})


def check(*, dataset: str, entry: str = "entry", extract: Extract = "raw", threshold: float = 0.0) -> None:
    """Raises ValueError for a missing package, an unknown data set or extraction, or a threshold above 1."""
    if extract not in ("last_number", "first_line", "raw"):
        raise ValueError(f'extract={extract!r} is none of "last_number", "first_line", "raw"')
    if not threshold <= 1:
        raise ValueError(f"threshold={threshold} must be at most 1: score_answer gives 0 to 1")
    try:
        _judge(dataset)
    except ImportError as error:
        raise ValueError(f"{error}; install it: pip install reasoning-gym") from None


@lru_cache
def _judge(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    """The data set's score_answer. Raises ValueError naming the nearest data sets, ImportError without the package."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=3, cutoff=0.4)
        raise ValueError(f"dataset={dataset!r} is none of reasoning_gym's {len(DATASETS)}; near it: {', '.join(near) or 'none'}")
    judge: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(dataset)
    return judge


def _as_text(gold: Any) -> Any:
    """The data sets hold their answers as text; one that a record writes as a number is the same answer."""
    return str(gold) if isinstance(gold, int | float) and not isinstance(gold, bool) else gold


def _extracted(completion: str, extract: Extract) -> str | None:
    """The answer inside a completion; None where there is none."""
    if extract == "raw":
        return completion.strip()
    if extract == "first_line":
        return completion.strip().partition("\n")[0].strip()
    number = last_number(completion)
    return None if number is None else f"{number:f}"
