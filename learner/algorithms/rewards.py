"""What an advantage is computed from: the usable samples of one prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

SPREAD_TOLERANCE = 1e-6  # max - min of rewards below this is float noise, not signal


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupScores:
    """Usable samples of one group, in table order.

    Example: GroupScores(rewards=tensor([1., 0.]), num_tokens=tensor([8, 5]), parts={"format": tensor([1., 1.])})
    """

    rewards: Tensor  # float64 [num_usable]
    num_tokens: Tensor  # int64 [num_usable], trained tokens
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # each float64 [num_usable]; NaN where a sample lacks it
    baseline: float = math.nan  # reward of the greedy answer to the prompt; NaN: the group has none


def checked_rewards(rewards: Tensor) -> Tensor:
    """The rewards in float64. Raises ValueError unless they are [num_usable], at least one, and finite."""
    if rewards.dim() != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards must be [num_usable] with at least one, got shape {tuple(rewards.shape)}")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}; a reward that could not be computed makes its sample unusable")
    return rewards.to(torch.float64)


def has_signal(rewards: Tensor) -> bool:
    """Whether values [n] (n at least 1) spread by at least SPREAD_TOLERANCE: max - min, never the mean."""
    values = rewards.to(torch.float64)
    return bool(values.max() - values.min() >= SPREAD_TOLERANCE)
