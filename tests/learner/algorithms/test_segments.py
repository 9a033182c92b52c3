"""Sums over the tokens of each sample."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.segments import reverse_cumulative, segment_mean, segment_sum


def test_tokens_are_added_to_their_own_sample() -> None:
    values, sequence = torch.tensor([1.0, 2.0, 10.0, 4.0]), torch.tensor([0, 0, 1, 0])
    assert segment_sum(values, sequence, num_sequences=3).tolist() == [7.0, 10.0, 0.0]
    assert segment_mean(values, sequence, num_sequences=3).tolist() == pytest.approx([7 / 3, 10.0, 0.0])  # a sample without a token: 0, not NaN


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=5), max_size=4))
def test_reverse_cumulative_is_the_sum_from_here_to_the_end_of_the_sample(samples: list[list[float]]) -> None:
    values = torch.tensor([v for s in samples for v in s], dtype=torch.float64)
    sequence = torch.tensor([i for i, s in enumerate(samples) for _ in s], dtype=torch.int64)
    expected = [sum(s[t:]) for s in samples for t in range(len(s))]
    assert reverse_cumulative(values, sequence, num_sequences=len(samples)).tolist() == pytest.approx(expected, abs=1e-9)


def test_vectors_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        segment_sum(torch.zeros(2), torch.zeros(3, dtype=torch.int64), num_sequences=1)
