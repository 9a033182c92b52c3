"""Entropy of the distribution at each token, from its logits."""

from __future__ import annotations

import torch
from torch import Tensor


def token_entropy(logits: Tensor) -> Tensor:
    """-sum p log p in nats, [num_tokens], from logits [num_tokens, vocabulary] (already divided by the temperature).

    As logsumexp(z) - sum p z, with z shifted by its maximum, so a logit of -inf adds 0 and not NaN.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [num_tokens, vocabulary], got {tuple(logits.shape)}")
    shifted = logits - logits.amax(dim=1, keepdim=True)
    log_total = torch.logsumexp(shifted, dim=1)
    probability = torch.exp(shifted - log_total[:, None])
    return log_total - (probability * shifted.masked_fill(probability == 0, 0.0)).sum(dim=1)
