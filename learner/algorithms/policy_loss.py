"""The clipped policy-gradient objective (PPO), against the log-probs of the policy that the ratio is measured from."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import ratio_of, same_length


def clipped_policy_loss(
    logprob: Tensor, old: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token, [num_tokens], and what was clipped.

    With r = exp(logprob - old): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where A < 0 at most
    dual_clip |A| (dual_clip > 1; None: no such bound). The log-ratio is bounded before exp, so that
    neither value nor gradient overflows; NaN passes through.
    Metrics are sums over tokens: `clipped_high`, `clipped_low`, `clipped_dual` (tokens whose gradient the bound removed), `ratio`.
    Source: Schulman et al. 2017, equation 7; asymmetric bounds Yu et al. 2025 (DAPO), equation 10; dual clip Ye et al. 2020, equation 5.
    Raises ValueError when the three differ in shape.
    """
    same_length(logprob=logprob, old=old, advantage=advantage)
    ratio = ratio_of(logprob - old)
    plain, clipped = -ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(plain, clipped)
    metrics = clip_metrics(ratio, advantage, low=1 - clip_low, high=1 + clip_high)
    if dual_clip is None:
        return loss, metrics
    bound = dual_clip * advantage.abs()  # reached for A < 0 only: for A >= 0 the loss is not above 0
    metrics["clipped_dual"] = (loss > bound).sum()
    return torch.minimum(loss, bound), metrics


def clip_metrics(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> dict[str, Tensor]:
    """Sums over tokens: those whose gradient a bound removed on either side, and the ratio."""
    return {
        "clipped_high": ((advantage > 0) & (ratio > high)).sum(),
        "clipped_low": ((advantage < 0) & (ratio < low)).sum(),
        "clipped_dual": torch.zeros((), dtype=torch.int64, device=ratio.device),
        "ratio": ratio.detach().sum(),
    }
