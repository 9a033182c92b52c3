"""How far the trainer's log-probs are from those that were sampled with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def kl_k1(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(behaviour || policy) a token: -log_ratio, unbiased, may be negative. log_ratio = logprob - behaviour, [n]."""
    return -log_ratio


def kl_k3(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(behaviour || policy) a token: exp(d) - 1 - d, never negative, of lower variance (Schulman 2020).

    The log-ratio is clamped before exp, so value and gradient stay finite; NaN passes through.
    """
    clamped = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped.exp() - 1 - clamped


def mismatch_summary(log_ratio: Tensor, *, clip_low: float, clip_high: float, percentiles: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, Tensor]:
    """Means, percentiles of |log_ratio| and the share of tokens outside the clip, of one batch; empty for no token.

    Args: log_ratio [n] of the policy that the batch was trained from, before its first update.
    """
    if log_ratio.dim() != 1:
        raise ValueError(f"log_ratio must be [n], got {tuple(log_ratio.shape)}")
    if log_ratio.numel() == 0:
        return {}
    size, ratio = log_ratio.abs().to(torch.float64), log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    summary = {
        "kl_k1": kl_k1(log_ratio).mean(),
        "kl_k3": kl_k3(log_ratio).mean(),
        "beyond_clip_share": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).to(torch.float64).mean(),
        "abs_max": size.max(),
    }
    ordered = size.sort().values
    for share in percentiles:
        summary[f"abs_p{share * 100:g}"] = ordered[_rank(share, ordered.numel())]
    return summary


def _rank(share: float, count: int) -> int:
    """Index of the nearest-rank percentile: the smallest value with at least `share` of the values at or below it."""
    return max(0, math.ceil(share * count) - 1)
