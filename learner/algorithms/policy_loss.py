"""The clipped policy-gradient objective against the log-probs that the samples were drawn with."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far outside any clip and far inside float32


def clipped_policy_loss(
    logprob: Tensor, behaviour: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of each token, [num_tokens], and what was clipped.

    With r = exp(logprob - behaviour): -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and where A < 0 at most
    dual_clip |A| (dual_clip > 1; None: no such bound). The log-ratio is clamped to +-MAX_LOG_RATIO before exp, so that
    neither value nor gradient overflows; NaN passes through.
    Metrics are sums over tokens: `clipped_high`, `clipped_low`, `clipped_dual` (tokens whose gradient the bound removed), `ratio`.
    Source: Schulman et al. 2017, equation 7; asymmetric bounds Yu et al. 2025 (DAPO), equation 10; dual clip Ye et al. 2020, equation 5.
    Raises ValueError when the three differ in shape.
    """
    if not logprob.shape == behaviour.shape == advantage.shape or logprob.dim() != 1:
        raise ValueError(f"logprob {tuple(logprob.shape)}, behaviour {tuple(behaviour.shape)} and advantage {tuple(advantage.shape)} must all be [num_tokens]")
    ratio = (logprob - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain, clipped = -ratio * advantage, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    loss = torch.maximum(plain, clipped)
    metrics = {
        "clipped_high": ((advantage > 0) & (ratio > 1 + clip_high)).sum(),
        "clipped_low": ((advantage < 0) & (ratio < 1 - clip_low)).sum(),
        "clipped_dual": torch.zeros((), dtype=torch.int64, device=loss.device),
        "ratio": ratio.detach().sum(),
    }
    if dual_clip is None:
        return loss, metrics
    bound = dual_clip * advantage.abs()  # reached for A < 0 only: for A >= 0 the loss is not above 0
    metrics["clipped_dual"] = (loss > bound).sum()
    return torch.minimum(loss, bound), metrics
