"""Discounted returns of tokens and of turns, for trajectories of several turns."""

from __future__ import annotations

import torch
from torch import Tensor


def token_returns(rewards: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} of one trajectory, [num_tokens], float64. Args: rewards [num_tokens], of drawn tokens in order."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards must be [num_tokens], got {tuple(rewards.shape)}")
    result = torch.zeros(rewards.numel(), dtype=torch.float64)
    following = 0.0
    for t in range(rewards.numel() - 1, -1, -1):
        following = float(rewards[t]) + gamma * following
        result[t] = following
    return result


def turn_returns(turn_rewards: Tensor, turn: Tensor, *, gamma: float) -> Tensor:
    """Return of the turn that each token belongs to, [num_tokens], float64: discounted once a turn, alike for all tokens of a turn.

    Args: turn_rewards [num_turns]; turn [num_tokens] int64, the turn of each drawn token. So a long turn is not discounted more than a short one.
    Raises ValueError when a token names a turn without a reward.
    """
    if turn.numel() and not 0 <= int(turn.min()) <= int(turn.max()) < turn_rewards.numel():
        raise ValueError(f"turn names turns {int(turn.min())} to {int(turn.max())}, but there are {turn_rewards.numel()} turn rewards")
    return token_returns(turn_rewards, gamma=gamma)[turn]
