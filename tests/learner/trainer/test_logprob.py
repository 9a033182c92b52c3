"""Log-probs at a temperature, by hand and against the whole matrix."""

from __future__ import annotations

import pytest
import torch

from learner.algorithms.entropy import token_entropy
from learner.trainer import logprob
from learner.trainer.logprob import Head, token_logprobs


def test_temperature_divides_logits_and_not_log_probs() -> None:
    # faults.md 40: logits [2, 1, 0] at T = .5 are [4, 2, 0]: log softmax -.142932, -2.142932, -4.142932
    hidden, weight = torch.ones(3, 1, dtype=torch.float64), torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64)
    found = token_logprobs(hidden, weight, None, torch.tensor([0, 1, 2]), head=Head(temperature=0.5))
    assert found.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


@pytest.mark.parametrize("block_tokens", [4, 16_384])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_tiles_give_the_values_and_gradients_of_the_whole_matrix(softcap: float | None, block_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 90
    monkeypatch.setattr(logprob, "BLOCK_TOKENS", block_tokens)
    torch.manual_seed(0)
    leaves = tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((13, 5), (11, 5), (11,)))
    hidden, weight, bias = leaves
    target = torch.randint(0, 11, (13,))
    raw = hidden @ weight.T + bias
    logits = (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / 0.7
    whole = torch.stack([torch.log_softmax(logits, dim=1).gather(1, target[:, None])[:, 0], token_entropy(logits)])
    factors = torch.stack([torch.arange(13), torch.arange(13).flip(0) - 4])
    expected = torch.autograd.grad((whole * factors).sum(), leaves)
    for tile in (1, 30, 52, 10_000):  # one class at a time, two, four, all
        head = Head(temperature=0.7, softcap=softcap, tile=tile)
        found = token_logprobs(hidden, weight, bias, target, head=head, with_entropy=True)
        torch.testing.assert_close(found, whole)
        for left, right in zip(torch.autograd.grad((found * factors).sum(), leaves), expected, strict=True):
            torch.testing.assert_close(left, right)
        torch.testing.assert_close(token_logprobs(hidden, weight, bias, target, head=head), whole[0])


def test_the_whole_matrix_never_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 90: 64 tokens over 4,096 classes in tiles of 8,192 logits
    sizes: list[int] = []
    made = logprob._logits

    def noted(*arguments: object) -> torch.Tensor:
        logits = made(*arguments)  # type: ignore[arg-type]
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(logprob, "_logits", noted)
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    token_logprobs(hidden, weight, None, torch.zeros(64, dtype=torch.int64), head=Head(temperature=1.0, tile=8192)).sum().backward()
    assert max(sizes) <= 8192 and len(sizes) == 2 * 32


def test_half_precision_is_reduced_in_float32() -> None:
    found = token_logprobs(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16), None, torch.tensor([3]), head=Head(temperature=1.0))
    assert found.dtype == torch.float32 and float(found.detach()) == pytest.approx(-2.0794415)


def test_a_float32_head_does_not_round_logits() -> None:
    # faults.md 45: 1 + 2^-8 is no bfloat16 (spacing 2^-7 above 1); as 1 * 1 + 2^-4 * 2^-4 it is exact in float32. Other logit 0: log(1 + e^-z)
    hidden, weight = torch.tensor([[1.0, 2.0**-4]], dtype=torch.bfloat16), torch.tensor([[1.0, 2.0**-4], [0.0, 0.0]], dtype=torch.bfloat16)
    exact, rounded = (float(token_logprobs(hidden, weight, None, torch.tensor([0]), head=Head(temperature=1.0, float32=wide))) for wide in (True, False))
    assert exact == pytest.approx(-0.3122125, abs=1e-6) and rounded == pytest.approx(-0.3132617, abs=1e-6)
    weight[0, 0] = 2.0  # nothing is kept of an earlier head
    assert float(token_logprobs(hidden, weight, None, torch.tensor([0]), head=Head(temperature=1.0, float32=True))) == pytest.approx(-0.1264624, abs=1e-6)


def test_no_target_keeps_the_graph() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    token_logprobs(torch.ones(0, 2), weight, None, torch.zeros(0, dtype=torch.int64), head=Head(temperature=1.0)).sum().backward()
    assert weight.grad is not None and not bool(weight.grad.any())


def test_more_positions_than_targets_are_refused() -> None:
    # faults.md 50
    with pytest.raises(ValueError, match=r"\(6, 2\).*\(3,\)"):
        token_logprobs(torch.ones(6, 2), torch.ones(3, 2), None, torch.zeros(3, dtype=torch.int64), head=Head(temperature=1.0))
    with pytest.raises(ValueError, match="temperature must be above 0"):
        Head(temperature=0.0)


def test_a_head_that_changes_in_place_is_read_anew_and_keeps_its_dtype() -> None:
    # faults.md 45: no cast copy of the head is kept from call to call, and a tied embedding is not cast with it
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(6, 8, dtype=torch.bfloat16)
    target = torch.tensor([0, 1, 2, 3])
    before = token_logprobs(hidden, weight, None, target, head=Head(temperature=1.0))
    weight.add_(torch.randn(6, 8).to(torch.bfloat16))
    after = token_logprobs(hidden, weight, None, target, head=Head(temperature=1.0))
    fresh = torch.log_softmax((hidden @ weight.T).float(), dim=1).gather(1, target[:, None])[:, 0]
    assert not torch.equal(before, after) and weight.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert torch.allclose(after, fresh, atol=0.05)


WITHOUT_TEXT = (2, 5, *range(300, 420))  # two holes, and padding behind the last id with text; 384 rows are computed, the rest is not


@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_ids_that_are_never_drawn_have_no_share_and_no_gradient(softcap: float | None, float32: bool) -> None:
    # faults.md 56, the learner's half
    torch.manual_seed(0)
    hidden, weight, bias = leaves = tuple(torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((13, 5), (420, 5), (420,)))
    without = torch.tensor(WITHOUT_TEXT)
    with torch.no_grad():
        bias[without] = 40.0  # the likeliest by far
    target = torch.randint(6, 300, (13,))
    raw = hidden @ weight.T + bias
    logits = (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / 0.7
    drawn = [i for i in range(420) if i not in WITHOUT_TEXT]
    whole = torch.stack([torch.log_softmax(logits[:, drawn], dim=1).gather(1, (target - 2)[:, None])[:, 0], token_entropy(logits[:, drawn])])  # two holes lie before each target
    factors = torch.stack([torch.arange(13), torch.arange(13).flip(0) - 4])
    expected = torch.autograd.grad((whole * factors).sum(), leaves)
    for tile in (1, 52, 10_000):  # one class at a time (tiles of a hole alone), four, all
        head = Head(temperature=0.7, softcap=softcap, tile=tile, without_text=WITHOUT_TEXT, float32=float32)
        found = token_logprobs(hidden, weight, bias, target, head=head, with_entropy=True)
        torch.testing.assert_close(found, whole)
        gradients = torch.autograd.grad((found * factors).sum(), leaves)
        for left, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(left, right)
        assert not bool(gradients[1][without].any()) and not bool(gradients[2][without].any())
        assert token_logprobs(hidden[:3], weight, bias, torch.tensor([5, 310, 419]), head=head).tolist() == [-torch.inf] * 3


def test_three_ids_of_which_one_is_never_drawn_by_hand() -> None:
    # logits 0, 1 and 9 (padding): log softmax of [0, 1] is -1.313262, -.313262
    weight = torch.tensor([[0.0], [1.0], [9.0]], dtype=torch.bfloat16)
    found = token_logprobs(torch.ones(2, 1, dtype=torch.bfloat16), weight, None, torch.tensor([0, 1]), head=Head(temperature=1.0, without_text=(2,), float32=True))
    assert found.tolist() == pytest.approx([-1.313262, -0.313262], abs=1e-6)
