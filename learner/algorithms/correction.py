"""Importance weights for tokens that another policy drew: level (token, sequence, geometric) x mode (truncate, clip, mask, reject)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.ratio import ratio_of, same_length
from learner.algorithms.segments import segment_mean, segment_sum

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask", "reject"]


def leveled_ratio(log_ratio: Tensor, sequence: Tensor, *, num_sequences: int, level: Level) -> Tensor:
    """Weight of each token before any bound, [num_tokens], detached.

    token: exp(d_t); sequence: exp(sum of the sample's d); geometric: exp(mean of the sample's d).
    log_ratio = target - behaviour. Sums are bounded in log space, as 1,000 tokens of 0.012 make e^12 (faults.md 46).
    """
    same_length(log_ratio=log_ratio, sequence=sequence)
    detached = log_ratio.detach()
    if level == "token":
        return ratio_of(detached)
    reduce = segment_sum if level == "sequence" else segment_mean
    return ratio_of(reduce(detached, sequence, num_sequences=num_sequences))[sequence]


def bounded_weight(ratio: Tensor, *, mode: Mode, low: float, high: float) -> Tensor:
    """The weight [num_tokens] that a loss is multiplied with.

    truncate: min(r, high) (TIS) · clip: r within [low, high] · mask: r inside [low, high], 0 outside (IcePop at token level, MIS at
    sequence level) · reject: 1 inside, 0 outside (a geometric level with this is Geo-RS).
    Source: Yao et al. 2025 (truncated importance sampling); Ling Team 2025 (IcePop, arXiv 2510.18855); Liu et al. 2025 (sequence-level masking).
    """
    inside = (ratio >= low) & (ratio <= high)
    if mode == "truncate":
        return ratio.clamp(max=high)
    if mode == "clip":
        return ratio.clamp(low, high)
    return torch.where(inside, ratio if mode == "mask" else torch.ones_like(ratio), torch.zeros_like(ratio))


def veto(log_ratio: Tensor, sequence: Tensor, *, num_sequences: int, lowest: float) -> Tensor:
    """1 or 0 a token, [num_tokens]: 0 for every token of a sample that has one with ratio < lowest (a token the target would hardly ever draw).

    NaN counts as an outlier. Source: Liu et al. 2025 (When Speed Kills Stability), token veto.
    """
    same_length(log_ratio=log_ratio, sequence=sequence)
    outlier = (~(ratio_of(log_ratio.detach()) >= lowest)).to(log_ratio.dtype)
    return (segment_sum(outlier, sequence, num_sequences=num_sequences) == 0).to(log_ratio.dtype)[sequence]
