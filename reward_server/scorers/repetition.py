"""repetition: a cost for saying the same again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

MAX_CHARS = 1 << 20  # looked at, from the end: one n-gram takes about a microsecond


def score(
    prompt: str,
    completion: str,
    fields: Mapping[str, Any],
    *,
    n: Annotated[int, Field(ge=1, le=100)] = 20,
    penalty: Annotated[float, Field(gt=0)] = 1.0,
    free: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> tuple[float, dict[str, float]]:
    """-penalty × the share of n-grams of words that have occurred before; 0 where fewer than n words stand.

    Example: n = 2, `a b a b`: of the 2-grams (a b), (b a), (a b) one of three is a repetition: -1/3.
    free: a share that costs nothing; from there the cost rises in a straight line to -penalty at all. Part: repeated, the share.
    Source: repetition penalty by n-grams (Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs", section 4.3), there a cost
    for each token. Limits: words are split at space, so a script written without space is one word; the last
    1,048,576 characters are looked at. To be added to another score.
    """
    words = completion[-MAX_CHARS:].split()
    total = len(words) - n + 1
    if total < 1:
        return 0.0, {"repeated": 0.0}
    repeated = 1.0 - len({hash(tuple(words[at : at + n])) for at in range(total)}) / total
    cost = max(0.0, repeated - free) / (1.0 - free)
    return -penalty * cost if cost else 0.0, {"repeated": repeated}
