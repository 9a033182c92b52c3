"""On-policy distillation: the student's own samples, judged token by token by a teacher."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithms.ratio import bounded, same_length


def distillation_advantages(logprob: Tensor, teacher: Tensor) -> Tensor:
    """teacher - logprob of each drawn token, [num_tokens], detached: minus the k1 estimate of KL(student || teacher).

    Used as a token's advantage in any policy loss; the score function makes the gradient of the reverse KL of it.
    Source: Agarwal et al. 2024 (GKD), on-policy reverse KL; Lu 2025 (On-Policy Distillation, Thinking Machines), its per-token form.
    """
    same_length(logprob=logprob, teacher=teacher)
    return bounded(teacher - logprob).detach()


def reverse_kl(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """sum_v p (log p - log t) of whole distributions, [num_tokens], from logits [num_tokens, vocabulary]; exact and of no sampling noise."""
    if logits.shape != teacher_logits.shape or logits.dim() != 2:
        raise ValueError(f"logits {tuple(logits.shape)} and teacher_logits {tuple(teacher_logits.shape)} must both be [num_tokens, vocabulary] of one vocabulary")
    student, teacher = torch.log_softmax(logits, dim=1), torch.log_softmax(teacher_logits, dim=1)
    return (student.exp() * (student - teacher)).sum(dim=1)
