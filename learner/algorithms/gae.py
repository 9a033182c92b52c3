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


def packed_advantages(rewards: Tensor, values: Tensor, sequence: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """generalized_advantages of every sample of a row at once, each [num_tokens], float64; every sample ends where its tokens end.

    A_t = delta_t + c_t A_{t+1} with c = gamma lam inside a sample and 0 at its last token: affine maps, which are joined in pairs, then in fours, ...
    (Hillis and Steele 1986), so that a row of n tokens takes log2(n) passes and no loop over tokens.
    Args: rewards, values [num_tokens]; sequence [num_tokens], samples one after another (it does not fall).
    """
    same_length(rewards=rewards, values=values, sequence=sequence)
    value = values.to(torch.float64)
    goes_on = torch.zeros_like(value)
    goes_on[:-1] = (sequence[1:] == sequence[:-1]).to(torch.float64)
    total = rewards.to(torch.float64) + gamma * goes_on * value.roll(-1) - value
    factor, reach = gamma * lam * goes_on, 1
    while reach < value.numel():
        total = torch.cat([total[:-reach] + factor[:-reach] * total[reach:], total[-reach:]])
        factor = torch.cat([factor[:-reach] * factor[reach:], torch.zeros_like(factor[-reach:])])
        reach *= 2
    return total, total + value
