"""Clip-Cov and KL-Cov: hold back the few tokens that lower entropy most, those where log-prob and advantage rise together.

Which tokens these are is a matter of the whole batch: the selections take the batch's means and counts as arguments and give a
threshold or a mask, so that ranks and rows agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.ratio import bounded, ratio_of, same_length


def token_covariance(logprob: Tensor, advantage: Tensor, *, logprob_mean: float, advantage_mean: float) -> Tensor:
    """(logprob - mean) (A - mean), [num_tokens], detached; means over all tokens of the batch. Source: Cui et al. 2025 (arXiv 2505.22617)."""
    same_length(logprob=logprob, advantage=advantage)
    return ((logprob - logprob_mean) * (advantage - advantage_mean)).detach()


def random_selection(covariance: Tensor, key: Tensor, *, low: float, high: float, num_eligible: int, num_wanted: float) -> Tensor:
    """Bool [num_tokens]: of the tokens with low <= covariance <= high a random num_wanted of num_eligible (counts of the whole batch).

    key [num_tokens] in [0, 1) decides: chosen where key < num_wanted / num_eligible. Source: Cui et al. 2025 (Clip-Cov).
    """
    same_length(covariance=covariance, key=key)
    eligible = (covariance >= low) & (covariance <= high)
    return eligible & (key < num_wanted / max(num_eligible, 1))


def top_threshold(values: Tensor, *, share: float) -> float:
    """Smallest value of the top ceil(share n) of the whole batch's values [n]; inf where that is none."""
    count = min(values.numel(), math.ceil(share * values.numel()))
    return float(values.topk(count).values[-1]) if count else math.inf


def without_gradient(loss: Tensor, selected: Tensor) -> Tensor:
    """The loss [num_tokens] with selected tokens detached: Clip-Cov's hold on them."""
    same_length(loss=loss, selected=selected)
    return torch.where(selected, loss.detach(), loss)


def kl_cov_loss(logprob: Tensor, old: Tensor, advantage: Tensor, selected: Tensor, *, coefficient: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-r A, and on selected tokens + coefficient |logprob - old|, [num_tokens]. Metrics: `ratio`, `held`.

    Source: Cui et al. 2025 (KL-Cov); the penalty of a token is the absolute log-ratio.
    """
    same_length(logprob=logprob, old=old, advantage=advantage, selected=selected)
    log_ratio = bounded(logprob - old)
    ratio = ratio_of(log_ratio)
    loss = -ratio * advantage + torch.where(selected, coefficient * log_ratio.abs(), torch.zeros_like(ratio))
    return loss, {"ratio": ratio.detach().sum(), "held": selected.sum()}
