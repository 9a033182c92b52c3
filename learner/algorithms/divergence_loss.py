"""DPPO: a trust region of the divergence between two policies at a token, in place of a clip of the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import bounded, ratio_of, same_length

_SMALLEST = 1e-12  # probability below which 1 - p is taken as this, so that logarithms stay finite


def binary_total_variation(logprob: Tensor, old: Tensor) -> Tensor:
    """|p - q| of the drawn token, [num_tokens]: total variation of (this token, any other). p = exp(logprob), q = exp(old)."""
    return (logprob.exp() - old.exp()).abs()


def binary_kl(logprob: Tensor, old: Tensor) -> Tensor:
    """q log(q / p) + (1 - q) log((1 - q) / (1 - p)), [num_tokens]: KL(old || policy) of (this token, any other)."""
    p, q = logprob.exp(), old.exp()
    rest_p, rest_q = (1 - p).clamp(min=_SMALLEST), (1 - q).clamp(min=_SMALLEST)
    return q * bounded(old - logprob) + rest_q * (rest_q / rest_p).log()


def divergence_loss(logprob: Tensor, old: Tensor, advantage: Tensor, divergence: Tensor, *, threshold: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-M r A, [num_tokens], with r = exp(logprob - old): M = 0 where the step would lead further out of the trust region, else 1.

    That is where divergence > threshold and the update moves away from old: A > 0 and r > 1, or A < 0 and r < 1.
    Metrics: `ratio`, `clipped_high`, `clipped_low` (masked tokens by the sign of A). Source: Qi et al. 2026 (DPPO, arXiv 2602.04879).
    Args: divergence [num_tokens] of binary_total_variation or binary_kl; no gradient flows through it.
    """
    same_length(logprob=logprob, old=old, advantage=advantage, divergence=divergence)
    ratio = ratio_of(logprob - old)
    beyond = divergence.detach() > threshold
    high, low = beyond & (advantage > 0) & (ratio > 1), beyond & (advantage < 0) & (ratio < 1)
    loss = torch.where(high | low, torch.zeros_like(ratio), -ratio * advantage)
    return loss, {"ratio": ratio.detach().sum(), "clipped_high": high.sum(), "clipped_low": low.sum()}
