"""Estimates of KL(p || q) from tokens drawn from p, with d = log p - log q of the drawn token; as a term of the loss or of the reward."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from learner.algorithms.ratio import bounded, ratio_of, same_length
from learner.algorithms.segments import reverse_cumulative

Estimator = Literal["k1", "k2", "k3"]
Gradient = Literal["plain", "straight_through", "importance"]


def k1(d: Tensor) -> Tensor:
    """d: unbiased, may be negative. As a loss its gradient has mean 0 and teaches nothing; use it in the reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2: biased in value, of low variance; on-policy its gradient is that of KL(p || q), unbiased."""
    return bounded(d).square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased, never negative, of low variance; its gradient is that of KL(q || p), not of KL(p || q).

    d is bounded before exp, so value and gradient stay finite; NaN passes through. Source of all three: Schulman 2020.
    """
    small = bounded(d)
    return (-small).exp() - 1 + small


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_loss(logprob: Tensor, reference: Tensor, *, estimator: Estimator, gradient: Gradient, log_ratio: Tensor) -> Tensor:
    """KL(policy || reference) of each token as a term of the loss, [num_tokens].

    plain: the estimator, differentiated as it stands. straight_through: its value with the gradient of k2 (unbiased on-policy; Liu et al. 2025,
    "Rethinking KL regularization"). importance: estimator * r with r = exp(log_ratio) carrying its gradient, so that the expectation over the
    sampler is the KL and its gradient the KL's, off-policy too (DeepSeek-V3.2, with k3).
    Args: log_ratio [num_tokens] = logprob - behaviour; only `importance` uses it.
    """
    same_length(logprob=logprob, reference=reference, log_ratio=log_ratio)
    d = logprob - reference
    value = ESTIMATORS[estimator](d)
    if gradient == "straight_through":
        slope = k2(d)
        return value.detach() + slope - slope.detach()
    return ratio_of(log_ratio) * value if gradient == "importance" else value


def kl_penalty_to_go(logprob: Tensor, reference: Tensor, sequence: Tensor, *, num_sequences: int, coefficient: float, estimator: Estimator) -> Tensor:
    """-coefficient * sum over this and the sample's later tokens of the KL estimate, [num_tokens], detached: KL in the reward.

    Added to a token's advantage. logprob is that of the policy that the batch was drawn from. Source: Hu et al. 2025 (REINFORCE++) with
    gamma 1; Ouyang et al. 2022 for KL as a reward of each token. Tokens of a sample must be in order (segments.reverse_cumulative).
    """
    same_length(logprob=logprob, reference=reference, sequence=sequence)
    penalty = ESTIMATORS[estimator]((logprob - reference).detach())
    return -coefficient * reverse_cumulative(penalty, sequence, num_sequences=num_sequences)


def adapted_coefficient(coefficient: float, measured: float, *, target: float, horizon_steps: float) -> float:
    """coefficient * (1 + clip(measured / target - 1, -0.2, 0.2) / horizon_steps); unchanged where measured is not finite.

    Source: Ziegler et al. 2019, section 2.2; there the horizon is in samples, here in steps. Raises ValueError unless target and horizon are above 0.
    """
    if not (target > 0 and horizon_steps > 0):
        raise ValueError(f"target={target} and horizon_steps={horizon_steps} must be above 0")
    if not math.isfinite(measured):
        return coefficient
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coefficient * (1 + error / horizon_steps)
