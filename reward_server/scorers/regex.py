"""regex: a pattern is found, and what it captured is the gold answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from reward_server.outcome import Unscored
from reward_server.scorers.gold import gold_texts


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    pattern: str,
    field: str = "",
    whole: bool = False,
    ignore_case: bool = False,
) -> float | Unscored:
    """1 when the pattern is found (with `field`: when the last match captured the record's answer), else 0.

    Example: pattern `<answer>(.*?)</answer>`, field `answer`. whole: the pattern must match from end to end.
    Limits: Python's `re`, which backtracks: a pattern that takes too long is killed at the scorer's limit.
    """
    compiled = _compiled(pattern, ignore_case)
    if not field:
        return float(bool(compiled.fullmatch(completion) if whole else compiled.search(completion)))
    gold = gold_texts(fields, field)
    if isinstance(gold, Unscored):
        return gold
    captured = _last_capture(compiled, completion, whole)
    return float(captured is not None and captured.strip() in {text.strip() for text in gold})


def check(*, pattern: str, field: str = "", whole: bool = False, ignore_case: bool = False) -> None:
    """Raises ValueError for a pattern that does not compile, or that captures nothing where a field is compared."""
    try:
        compiled = _compiled(pattern, ignore_case)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from None
    if field and not compiled.groups:
        raise ValueError(f"field={field!r} compares what the pattern captures, and pattern={pattern!r} has no group; put the answer's part in parentheses")


@lru_cache
def _compiled(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE if ignore_case else 0)


def _last_capture(compiled: re.Pattern[str], text: str, whole: bool) -> str | None:
    """Group 1 of the last match; None where there is no match, or the group took no part in it."""
    last = None
    for match in [compiled.fullmatch(text)] if whole else compiled.finditer(text):
        last = match or last
    return last.group(1) if last else None
