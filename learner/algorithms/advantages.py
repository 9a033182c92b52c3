"""Group-relative advantages: how much better a sample did than the others of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor

SPREAD_TOLERANCE = 1e-6  # max - min of rewards below this is float noise, not signal


def group_advantages(rewards: Tensor, *, normalize: bool) -> Tensor:
    """(r - mean) / std over one group's usable samples, [num_usable], float64.

    The standard deviation is the population's (divided by n), from centred values, without a floor. A group whose rewards
    spread less than SPREAD_TOLERANCE gives exactly 0; with `normalize` off it is r - mean.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; docs/algorithms.md says where we depart.
    Args: rewards [num_usable], finite, at least one. Raises ValueError otherwise.
    """
    if rewards.dim() != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards must be [num_usable] with at least one, got shape {tuple(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}; a reward that could not be computed makes its sample unusable")
    values = rewards.to(torch.float64)
    if not has_signal(values):
        return torch.zeros_like(values)
    centred = values - values.mean()
    return centred / centred.square().mean().sqrt() if normalize else centred


def has_signal(rewards: Tensor) -> bool:
    """Whether the rewards of a group, [num_usable], spread by at least SPREAD_TOLERANCE."""
    values = rewards.to(torch.float64)
    return bool(values.max() - values.min() >= SPREAD_TOLERANCE)
