"""Losses whose ratio is the sample's and not the token's: GSPO and the geometric mean (GMPO)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.policy_loss import clip_metrics
from learner.algorithms.ratio import bounded, ratio_of, same_length
from learner.algorithms.segments import segment_mean


def gspo_loss(
    logprob: Tensor, old: Tensor, advantage: Tensor, sequence: Tensor, *, num_sequences: int, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token carries its sample's loss, [num_tokens]: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A).

    s = exp(mean over the sample's trained tokens of (logprob - old)). With `sequence_mean` the samples' losses are averaged, as in
    the paper. Source: Zheng et al. 2025 (GSPO, arXiv 2507.18071), equations 5 and 7. Metrics as of clipped_policy_loss, by token.
    """
    same_length(logprob=logprob, old=old, advantage=advantage, sequence=sequence)
    ratio = ratio_of(segment_mean(logprob - old, sequence, num_sequences=num_sequences))[sequence]
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return loss, clip_metrics(ratio, advantage, low=1 - clip_low, high=1 + clip_high)


def geometric_mean_loss(
    logprob: Tensor, old: Tensor, advantage: Tensor, sequence: Tensor, *, num_sequences: int, clip_log: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each token carries its sample's loss, [num_tokens]: -A exp(mean over tokens of the clipped log-ratio).

    A token's log-ratio d is clipped on the side that PPO would clip: min(d, clip_log) where A > 0, max(d, -clip_log) where A < 0; so
    one outlier moves the sample's mean by at most clip_log / tokens.
    Source: Zhao et al. 2025 (GMPO, arXiv 2507.20673), with token-level clipping to (exp -clip_log, exp clip_log).
    """
    same_length(logprob=logprob, old=old, advantage=advantage, sequence=sequence)
    log_ratio = bounded(logprob - old)
    clipped = torch.where(advantage >= 0, log_ratio.clamp(max=clip_log), log_ratio.clamp(min=-clip_log))
    ratio = ratio_of(segment_mean(clipped, sequence, num_sequences=num_sequences))[sequence]
    metrics = clip_metrics(log_ratio.detach().exp(), advantage, low=math.exp(-clip_log), high=math.exp(clip_log))
    return -ratio * advantage, metrics
