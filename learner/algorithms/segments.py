"""Sums and means over the tokens of each sample, where the tokens of several samples lie in one vector.

`sequence` [n] int64 says which sample each token belongs to, from 0 to num_sequences - 1. Only trained tokens are in such a
vector, so masked tokens are in no sum and no count.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """Sum of each sample's values, [num_sequences]. Raises ValueError when values and sequence differ in shape."""
    if values.shape != sequence.shape or values.dim() != 1:
        raise ValueError(f"values {tuple(values.shape)} and sequence {tuple(sequence.shape)} must both be [n]")
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def segment_mean(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """Mean of each sample's values, [num_sequences]; 0 for a sample without a token."""
    count = segment_sum(torch.ones_like(values), sequence, num_sequences=num_sequences)
    return segment_sum(values, sequence, num_sequences=num_sequences) / count.clamp(min=1)


def reverse_cumulative(values: Tensor, sequence: Tensor, *, num_sequences: int) -> Tensor:
    """Of each token the sum over itself and the later tokens of its sample, [n].

    The tokens of a sample must be in order, and samples must lie one after another (sequence does not fall).
    """
    total = segment_sum(values, sequence, num_sequences=num_sequences)
    through = values.cumsum(0)
    before_sample = (total.cumsum(0) - total)[sequence]
    return total[sequence] - (through - before_sample) + values
