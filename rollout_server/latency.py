"""How long requests wait for tokens: figures of the last ones, and totals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

KEPT = 512  # requests that quantiles are taken of
QUANTILES = (0.5, 0.95, 0.99)


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """Nearest-rank quantiles by name; empty without values. Example: of 1, 2, 3, 4 the 0.5-quantile is 2 and the 0.95-quantile 4."""
    ordered = sorted(values)
    return {f"{q:g}": ordered[math.ceil(q * len(ordered)) - 1] for q in QUANTILES} if ordered else {}


class Latency:
    """Of one engine since its start. Example: first_token(0.02), then gap(1.2, 60) for 60 more tokens in 1.2 s."""

    def __init__(self) -> None:
        self.first_token_s: deque[float] = deque(maxlen=KEPT)  # from admission to the first token, one a request
        self.inter_token_s: deque[float] = deque(maxlen=KEPT)  # mean time between two tokens, one a request
        self.num_first_tokens = 0
        self.total_first_token_s = 0.0
        self.num_gaps = 0
        self.total_gap_s = 0.0

    @classmethod
    def of(cls, several: Sequence[Latency]) -> Latency:
        """Of several engines together."""
        whole = cls()
        whole.first_token_s.extend(value for each in several for value in each.first_token_s)
        whole.inter_token_s.extend(value for each in several for value in each.inter_token_s)
        whole.num_first_tokens = sum(each.num_first_tokens for each in several)
        whole.total_first_token_s = sum(each.total_first_token_s for each in several)
        whole.num_gaps = sum(each.num_gaps for each in several)
        whole.total_gap_s = sum(each.total_gap_s for each in several)
        return whole

    def first_token(self, waited_s: float) -> None:
        self.first_token_s.append(waited_s)
        self.num_first_tokens += 1
        self.total_first_token_s += waited_s

    def gaps(self, drawing_s: float, num_gaps: int) -> None:
        """A request ended that had drawn num_gaps tokens after its first, in drawing_s."""
        if num_gaps < 1:
            return
        self.inter_token_s.append(drawing_s / num_gaps)
        self.num_gaps += num_gaps
        self.total_gap_s += drawing_s
