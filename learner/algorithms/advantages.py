"""Group-relative advantages (GRPO, Dr. GRPO): how much better a sample did than the others of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.rewards import checked_rewards, has_signal


def group_advantages(rewards: Tensor, *, normalize: bool, ddof: int = 0) -> Tensor:
    """(r - mean) / std over one group's usable samples, [num_usable], float64.

    std = sqrt(sum((r - mean)^2) / (n - ddof)): ddof 0 is the population's (default), 1 the sample's. From centred values,
    without a floor. A group whose rewards spread less than SPREAD_TOLERANCE gives exactly 0; with `normalize` off it is r - mean.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; without the division Liu et al. 2025 (Dr. GRPO).
    Args: rewards [num_usable], finite, at least one. Raises ValueError otherwise.
    """
    values = checked_rewards(rewards)
    if not has_signal(values):
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred / (centred.square().sum() / (values.numel() - ddof)).sqrt() if normalize else centred
