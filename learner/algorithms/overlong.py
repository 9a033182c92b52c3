"""Soft punishment of answers that come close to the length limit."""

from __future__ import annotations

import torch
from torch import Tensor


def overlong_penalty(num_tokens: Tensor, *, max_tokens: int, buffer_tokens: int, truncated: Tensor) -> Tensor:
    """0 up to max - buffer tokens, from there linearly down to -1 at max, -1 for a truncated answer, [n], float64.

    Source: Yu et al. 2025 (DAPO), equation 13; an answer cannot be longer than the limit here, so "longer" is "truncated".
    Args: num_tokens [n] completion tokens; truncated [n] bool. Raises ValueError unless 1 <= buffer_tokens <= max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be between 1 and max_tokens={max_tokens}")
    over = num_tokens.to(torch.float64) - (max_tokens - buffer_tokens)
    penalty = -(over / buffer_tokens).clamp(0, 1)
    return torch.where(truncated, torch.full_like(penalty, -1.0), penalty)
