"""ReMax: each sample against the reward of the greedy answer to the same prompt."""

from __future__ import annotations

import math

from torch import Tensor

from learner.algorithms.rewards import checked_rewards


def greedy_baseline_advantages(rewards: Tensor, *, greedy_reward: float) -> Tensor:
    """r_i - r(greedy answer), [num_usable], float64. The baseline does not depend on the sample, so it adds no bias.

    Source: Li et al. 2024 (ReMax, arXiv 2310.10505). Raises ValueError when greedy_reward is not finite.
    """
    if not math.isfinite(greedy_reward):
        raise ValueError(f"greedy_reward must be finite, got {greedy_reward}; without the greedy answer's reward the group has no baseline")
    return checked_rewards(rewards) - greedy_reward
