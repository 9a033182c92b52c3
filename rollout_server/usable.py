"""Whether a sample may be trained on, as far as its tokens and log-probs tell."""

from __future__ import annotations

import math
from collections.abc import Sequence


def unusable_reason(token_ids: Sequence[int], logprobs: Sequence[float], *, num_known: int) -> str:
    """Empty: nothing stands against it. num_known: ids at or above it have no text, and no tokenizer could have made them.

    A log-prob that is no finite number (-inf of a token that was cut away, NaN of numerics) makes this one sample unusable and no other.
    """
    if not all(math.isfinite(value) for value in logprobs):
        return "non_finite_logprob"
    if token_ids and max(token_ids) >= num_known:
        return "token_without_text"
    return ""
