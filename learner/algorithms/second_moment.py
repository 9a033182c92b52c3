"""M2PO: leave out just as many of the most off-policy tokens as bring the second moment of the log-ratio under a bound."""

from __future__ import annotations

import math

from torch import Tensor


def second_moment_threshold(log_ratio: Tensor, *, bound: float) -> float:
    """Largest |log-ratio| to keep, so that the mean of squares over the kept tokens of the whole batch is at most `bound`.

    Tokens go out from the largest down; inf where none must, -1 where none may stay. Equal values go together, never cut in the middle.
    Source: Zheng et al. 2025 (M2PO, arXiv 2510.01161), algorithm 1 with tau = 0.04. Args: log_ratio [n] of all tokens of the batch, finite.
    """
    if log_ratio.dim() != 1:
        raise ValueError(f"log_ratio must be [n], got {tuple(log_ratio.shape)}")
    ordered = sorted((abs(float(value)) for value in log_ratio), reverse=True)
    total, left = math.fsum(value * value for value in ordered), len(ordered)
    if left == 0 or total <= bound * left:
        return math.inf
    for index, value in enumerate(ordered):
        total -= value * value
        left -= 1
        is_last_of_ties = index + 1 == len(ordered) or ordered[index + 1] < value
        if is_last_of_ties and left and total <= bound * left * (1 + 1e-12):
            return ordered[index + 1]
    return -1.0


def within(log_ratio: Tensor, threshold: float) -> Tensor:
    """1 or 0 a token, [num_tokens]: 1 where |log_ratio| <= threshold."""
    return (log_ratio.detach().abs() <= threshold).to(log_ratio.dtype)
