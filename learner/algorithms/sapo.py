"""SAPO: a smooth gate of the ratio in place of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import ratio_of, same_length


def sapo_loss(logprob: Tensor, old: Tensor, advantage: Tensor, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, [num_tokens], with r = exp(logprob - old), tau by the sign of A.

    At r = 1 the slope in r is exactly 1, as without a gate; it fades on both sides, faster with a larger tau.
    Metrics: `ratio` and `gate`, the sum of the slope 4 p (1 - p), p the sigmoid. Source: Gao et al. 2025 (SAPO, arXiv 2511.20347).
    """
    same_length(logprob=logprob, old=old, advantage=advantage)
    ratio = ratio_of(logprob - old)
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantage, {"ratio": ratio.detach().sum(), "gate": (4 * gate * (1 - gate)).detach().sum()}
