"""Log-probs of chosen tokens at the sampling temperature, and entropies where wanted, a chunk of tokens at a time.

The matrix [tokens, vocabulary] is the largest tensor of a language model's loss. Each chunk's logits are computed, reduced to
one or two numbers a token, thrown away, and computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from learner.algorithms.entropy import token_entropy

CHUNK_TOKENS = 1024


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *, temperature: float, chunk_tokens: int = CHUNK_TOKENS, with_entropy: bool = False
) -> Tensor:
    """log softmax(logits / temperature)[target], [num_targets], at least float32; with_entropy: [2, num_targets], the entropies below.

    Args: hidden [num_targets, width]; weight [vocabulary, width] and bias [vocabulary] of the output head; target [num_targets].
    Raises ValueError when hidden and target disagree in number, or temperature is not above 0.
    """
    if hidden.dim() != 2 or target.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} must be [n, width] and [n] of one n")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}; greedy samples have no distribution to train on")
    pieces = [
        checkpoint(_chunk, h, weight, bias, t, temperature, with_entropy, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(chunk_tokens), target.split(chunk_tokens), strict=True)
    ]
    return torch.cat(pieces, dim=-1)


def _chunk(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprob = logits.gather(1, target[:, None])[:, 0] - torch.logsumexp(logits, dim=1)
    return torch.stack([logprob, token_entropy(logits)]) if with_entropy else logprob
