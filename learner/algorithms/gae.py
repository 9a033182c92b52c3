"""GAE: advantages of tokens (or of turns) from a critic's values."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import same_length


def generalized_advantages(rewards: Tensor, values: Tensor, *, gamma: float, lam: float, last_value: float = 0.0) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [num_steps], of one trajectory, float64.

    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  return_t = A_t + V_t,
    with V after the end = last_value: 0 where the trajectory ended, the critic's value where it was cut off.
    A step is a token the policy drew, or a turn; tokens it did not draw are left out beforehand, so the next step after a tool's answer
    is the next drawn token. Source: Schulman et al. 2016 (GAE), equations 11 to 16.
    """
    same_length(rewards=rewards, values=values)
    advantages = torch.zeros(rewards.numel(), dtype=torch.float64)
    following, next_value = 0.0, last_value
    for t in range(rewards.numel() - 1, -1, -1):
        delta = float(rewards[t]) + gamma * next_value - float(values[t])
        following = delta + gamma * lam * following
        advantages[t], next_value = following, float(values[t])
    return advantages, advantages + values.to(torch.float64)
