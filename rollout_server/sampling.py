"""Drawing one token from logits: the distribution, the draw and the log-prob of what was drawn."""

from __future__ import annotations

import torch

from rollout_server.engine import SamplingSpec


def log_distribution(logits: torch.Tensor, sampling: SamplingSpec) -> torch.Tensor:
    """Log-probs [vocabulary] of exactly what is drawn from: logits / temperature, then top-k, then top-p, renormalised.

    Greedy (temperature 0) reports the log-probs at temperature 1. Tokens cut away have -inf.
    Example: logits [2, 1, 0], temperature 0.5 gives [-0.142932, -2.142932, -4.142932].
    """
    assert logits.ndim == 1, f"logits of one position are needed, got shape {tuple(logits.shape)}"
    scaled = logits.float() / (sampling.temperature or 1.0)
    if 0 < sampling.top_k < scaled.numel():
        least = torch.topk(scaled, sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = torch.sort(scaled, descending=True)
        before = torch.cumsum(torch.softmax(ordered, -1), -1) - torch.softmax(ordered, -1)
        scaled = scaled.masked_fill(torch.zeros_like(before, dtype=torch.bool).scatter(0, order, before >= sampling.top_p), -torch.inf)
    return torch.log_softmax(scaled, -1)


def draw(logits: torch.Tensor, sampling: SamplingSpec, generator: torch.Generator) -> tuple[int, float]:
    """(token, its log-prob). Deterministic given the generator's state."""
    logprobs = log_distribution(logits, sampling)
    if sampling.temperature == 0:
        token = int(torch.argmax(logprobs))
    else:
        # Gumbel-max: argmax of logprob + Gumbel noise is a draw from exp(logprob); unlike multinomial it survives NaN.
        uniform = torch.rand(logprobs.shape, generator=generator).clamp_min(torch.finfo(torch.float32).tiny)
        token = int(torch.argmax(logprobs - torch.log(-torch.log(uniform))))
    return token, float(logprobs[token])
