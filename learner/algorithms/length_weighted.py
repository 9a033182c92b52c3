"""OPO: the baseline of least variance when a sample's gradient grows with its length."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.rewards import checked_rewards, has_signal


def length_weighted_advantages(rewards: Tensor, num_tokens: Tensor) -> Tensor:
    """r_i - sum_j(l_j r_j) / sum_j(l_j), [num_usable], float64, with l the trained tokens; not divided by a deviation.

    A group without spread, or without a trained token, gives exactly 0.
    Source: Hao et al. 2025 (On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585).
    """
    values = checked_rewards(rewards)
    if num_tokens.shape != values.shape:
        raise ValueError(f"num_tokens {tuple(num_tokens.shape)} and rewards {tuple(values.shape)} must both be [num_usable]")
    lengths = num_tokens.to(torch.float64)
    if not has_signal(values) or float(lengths.sum()) == 0:
        return torch.zeros_like(values)
    return values - (lengths * values).sum() / lengths.sum()
