"""pass@k: its unbiased estimate, and advantages that raise it instead of pass@1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.algorithms.rewards import checked_rewards, has_signal


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    Unbiased for n >= k. Source: Chen et al. 2021 (Codex), equation 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"num_samples={num_samples}, num_correct={num_correct}, k={k}: needs 0 <= num_correct <= num_samples and 1 <= k <= num_samples")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_advantages(rewards: Tensor, *, k: int, threshold: float = 0.5) -> Tensor:
    """Advantage of each sample averaged over all subsets of k of its group, [num_usable], float64.

    With a subset worth 1 if any member is correct (reward >= threshold), else 0: mean R = pass_at_k, deviation
    s = sqrt(R (1 - R)); a correct sample gets (1 - R) / s, a wrong one (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / s with w
    wrong samples. R = 0 or 1 (every subset alike) or fewer samples than k: exactly 0.
    Source: Chen et al. 2025 (Pass@k Training, arXiv 2508.10751), the analytical form.
    """
    correct = checked_rewards(rewards) >= threshold
    num_samples, num_correct = correct.numel(), int(correct.sum())
    if k > num_samples:
        return torch.zeros(num_samples, dtype=torch.float64)
    mean = pass_at_k(num_samples, num_correct, k)
    if not 0 < mean < 1:
        return torch.zeros(num_samples, dtype=torch.float64)
    deviation = math.sqrt(mean * (1 - mean))
    num_wrong = num_samples - num_correct
    subsets_of_wrong = math.comb(num_wrong - 1, k - 1) / math.comb(num_samples - 1, k - 1)
    right, wrong = (1 - mean) / deviation, (1 - mean - subsets_of_wrong) / deviation
    return torch.where(correct, torch.tensor(right, dtype=torch.float64), torch.tensor(wrong, dtype=torch.float64))


def best_of_group_advantages(rewards: Tensor) -> Tensor:
    """max(r) - max(others) for the best sample and 0 for the rest, [num_usable], float64; exactly 0 without spread or on a tie.

    The leave-one-out advantage of max(r) over the whole group. Source: Tang et al. 2025 (arXiv 2503.19595).
    """
    values = checked_rewards(rewards)
    result = torch.zeros_like(values)
    if has_signal(values):
        best, second = values.topk(2).values.tolist()
        result[values.argmax()] = best - second
    return result
