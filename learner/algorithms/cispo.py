"""CISPO: the importance weight is clipped and held constant, so no token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from learner.algorithms.policy_loss import clip_metrics
from learner.algorithms.ratio import ratio_of, same_length


def cispo_loss(logprob: Tensor, old: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-clip(r, 1 - clip_low, 1 + clip_high) A logprob, [num_tokens], with r = exp(logprob - old) detached.

    clip_low 1 (the paper's choice: no lower bound) lets the weight go down to 0. Metrics as of clipped_policy_loss; here a clipped
    token keeps a gradient, of bounded size. Source: MiniMax 2025 (MiniMax-M1, arXiv 2506.13585), equations 4 and 5.
    """
    same_length(logprob=logprob, old=old, advantage=advantage)
    ratio = ratio_of(logprob.detach() - old)
    loss = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage * logprob
    return loss, clip_metrics(ratio, advantage, low=1 - clip_low, high=1 + clip_high)
