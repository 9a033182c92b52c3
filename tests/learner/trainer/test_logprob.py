"""Log-probs at a temperature, by hand and against the whole matrix."""

from __future__ import annotations

import pytest
import torch

from learner.trainer.logprob import token_logprobs


def test_temperature_divides_logits_and_not_log_probs() -> None:
    # faults.md 40: logits [2, 1, 0] at T = .5 are [4, 2, 0]: log softmax -.142932, -2.142932, -4.142932
    hidden, weight = torch.ones(3, 1, dtype=torch.float64), torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64)
    found = token_logprobs(hidden, weight, None, torch.tensor([0, 1, 2]), temperature=0.5)
    assert found.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_chunks_give_the_values_and_gradients_of_the_whole_matrix() -> None:
    # faults.md 90
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((13, 5), (11, 5), (11,)))
    target = torch.randint(0, 11, (13,))
    whole = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=1).gather(1, target[:, None])[:, 0]
    expected = torch.autograd.grad((whole * torch.arange(13)).sum(), (hidden, weight, bias))
    for chunk_tokens in (1, 4, 13, 100):
        found = token_logprobs(hidden, weight, bias, target, temperature=0.7, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(found, whole)
        for left, right in zip(torch.autograd.grad((found * torch.arange(13)).sum(), (hidden, weight, bias)), expected, strict=True):
            torch.testing.assert_close(left, right)


def test_half_precision_is_reduced_in_float32() -> None:
    found = token_logprobs(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16), None, torch.tensor([3]), temperature=1.0)
    assert found.dtype == torch.float32 and float(found) == pytest.approx(-2.0794415)


def test_no_target_keeps_the_graph() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    token_logprobs(torch.ones(0, 2), weight, None, torch.zeros(0, dtype=torch.int64), temperature=1.0).sum().backward()
    assert weight.grad is not None and not bool(weight.grad.any())


def test_more_positions_than_targets_are_refused() -> None:
    # faults.md 50
    with pytest.raises(ValueError, match=r"\(6, 2\).*\(3,\)"):
        token_logprobs(torch.ones(6, 2), torch.ones(3, 2), None, torch.zeros(3, dtype=torch.int64), temperature=1.0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(torch.ones(3, 2), torch.ones(3, 2), None, torch.zeros(3, dtype=torch.int64), temperature=0.0)
