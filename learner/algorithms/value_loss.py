"""A critic's regression to returns, its step bounded like the policy's."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import same_length


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((V - R)^2, (V_clipped - R)^2), [num_tokens], V_clipped = old + clip(V - old, -clip, clip); None: 0.5 (V - R)^2.

    The larger of both, so that clipping never makes the loss smaller. Metrics: `clipped_value`, tokens where the clipped one was chosen.
    Source: Huang et al. 2022 (37 implementation details of PPO): value function loss clipping.
    """
    same_length(value=value, old_value=old_value, returns=returns)
    plain = (value - returns).square()
    if clip is None:
        return 0.5 * plain, {"clipped_value": torch.zeros((), dtype=torch.int64, device=value.device)}
    clipped = (old_value + (value - old_value).clamp(-clip, clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"clipped_value": (clipped > plain).sum()}
