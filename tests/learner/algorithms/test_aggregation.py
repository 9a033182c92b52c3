"""Denominators: whole batch, usable and unmasked tokens only, whatever the split."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.aggregation import sequence_mean, sequence_sum, token_mean


@given(st.lists(st.integers(0, 16), max_size=4))
def test_token_mean_is_the_same_for_every_split(cuts: list[int]) -> None:
    # faults.md 82: lengths 1, 2, 3, 10 with token losses 4, 3, 2, 1: (4 + 6 + 6 + 10) / 16 = 1.625
    losses = torch.tensor([4.0] + [3.0] * 2 + [2.0] * 3 + [1.0] * 10)
    bounds = [0, *sorted(cuts), 16]
    parts = [losses[a:b] for a, b in itertools.pairwise(bounds)]
    assert float(sum(token_mean(part, num_tokens=16) for part in parts)) == pytest.approx(1.625, rel=1e-6)


def test_masked_tokens_are_in_neither_numerator_nor_denominator() -> None:
    # faults.md 77: 4 sequences of 10 tokens, loss .5, one masked: 30 tokens of .5 over 30 (over 40 it would be .375)
    assert float(token_mean(torch.full((30,), 0.5), num_tokens=30)) == pytest.approx(0.5)


def test_accumulating_micro_batches_does_not_divide_again() -> None:
    # faults.md 83: 8 samples at once, or two at a time, give the same gradient
    weight = torch.ones(8, requires_grad=True)
    token_mean(weight * torch.arange(8.0), num_tokens=8).backward()
    assert weight.grad is not None
    at_once, weight.grad = weight.grad.clone(), None
    for i in range(0, 8, 2):
        token_mean(weight[i : i + 2] * torch.arange(8.0)[i : i + 2], num_tokens=8).backward()
    assert weight.grad is not None and torch.equal(at_once, weight.grad)


def test_sequence_mean_weighs_every_sample_alike() -> None:
    # samples of 1 token (loss 4) and 3 tokens (loss 1, 2, 3): (4 + 2) / 2 = 3; the token mean would be 2.5
    losses, tokens = torch.tensor([4.0, 1.0, 2.0, 3.0]), torch.tensor([1, 3, 3, 3])
    assert float(sequence_mean(losses, tokens, num_sequences=2)) == pytest.approx(3.0)


def test_a_part_without_tokens_adds_nothing_and_keeps_its_graph() -> None:
    # faults.md 88
    weight = torch.ones(0, requires_grad=True)
    loss = token_mean(weight, num_tokens=5)
    loss.backward()
    assert float(loss.detach()) == 0


def test_an_empty_denominator_is_refused_instead_of_becoming_nan() -> None:
    # faults.md 79
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        token_mean(torch.zeros(0), num_tokens=0)
    with pytest.raises(ValueError, match="num_sequences"):
        sequence_mean(torch.zeros(0), torch.zeros(0), num_sequences=0)


def test_sequence_sum_divides_by_a_constant_and_not_by_length() -> None:
    # samples of 1 token (4) and 3 tokens (1, 2, 3), budget 10: (4 + 6) / (2 * 10) = .5
    assert float(sequence_sum(torch.tensor([4.0, 1.0, 2.0, 3.0]), num_sequences=2, norm_tokens=10)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="norm_tokens must be at least 1"):
        sequence_sum(torch.zeros(1), num_sequences=1, norm_tokens=0)
