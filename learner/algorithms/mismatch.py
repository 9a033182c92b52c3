"""How far the trainer's log-probs are from those that were sampled with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from learner.algorithms.kl import k1, k3
from learner.algorithms.ratio import ratio_of


def mismatch_summary(log_ratio: Tensor, *, clip_low: float, clip_high: float, percentiles: Sequence[float] = (0.5, 0.9, 0.99)) -> dict[str, Tensor]:
    """How far trainer and sampler are apart over one batch, before its first update; empty for no token.

    Estimates of KL(sampler || trainer), percentiles of |log_ratio|, the share of tokens outside the clip, and `ess`, the effective
    sample size (sum r)^2 / (n sum r^2) as a share of the tokens: 1 where all weigh alike, 1 / n where one outweighs all.
    Args: log_ratio [n] = trainer - sampler, of the policy that the batch was trained from.
    """
    if log_ratio.dim() != 1:
        raise ValueError(f"log_ratio must be [n], got {tuple(log_ratio.shape)}")
    if log_ratio.numel() == 0:
        return {}
    size, ratio = log_ratio.abs().to(torch.float64), ratio_of(log_ratio.to(torch.float64))
    summary = {
        "kl_k1": k1(-log_ratio).mean(),
        "kl_k3": k3(-log_ratio).mean(),
        "ess": ratio.sum().square() / (ratio.numel() * ratio.square().sum()),
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
