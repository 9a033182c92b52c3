"""RLOO: each sample against the mean of the others of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.rewards import checked_rewards, has_signal


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """r_i - mean of the others, [num_usable], float64; computed as n / (n - 1) * (r_i - mean of all).

    A group of one, or of a spread under SPREAD_TOLERANCE, gives exactly 0.
    Source: Kool et al. 2019; Ahmadian et al. 2024 (Back to Basics), section 3.2.
    """
    values = checked_rewards(rewards)
    if not has_signal(values):
        return torch.zeros_like(values)
    return (values - values.mean()) * values.numel() / (values.numel() - 1)
