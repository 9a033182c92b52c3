"""GSPO and the geometric mean by hand, against transcripts, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.sequence_ratio import geometric_mean_loss, gspo_loss
from tests.learner.algorithms import slopes

SEQUENCE = torch.tensor([0, 0, 1])


def gspo(logprob: Tensor, advantage: list[float], *, old: float = -1.0, clip_low: float = 0.1, clip_high: float = 0.2) -> tuple[Tensor, dict[str, Tensor]]:
    return gspo_loss(logprob, torch.full_like(logprob, old), slopes.vector(advantage), SEQUENCE, num_sequences=2, clip_low=clip_low, clip_high=clip_high)


def test_the_ratio_of_a_sample_is_the_geometric_mean_of_its_tokens() -> None:
    # log-ratios .3 and -.1: mean .1: e^.1 = 1.10517; the other sample alone: e^-.05 = .95123
    loss, metrics = gspo(slopes.vector([-0.7, -1.1, -1.05]), [2.0, 2.0, -1.0])
    assert loss.tolist() == pytest.approx([-2.21034, -2.21034, 0.95123], abs=1e-5)
    assert float(metrics["ratio"]) == pytest.approx(2 * 1.10517 + 0.95123, abs=1e-4)


def test_a_clipped_sample_loses_the_gradient_of_all_its_tokens() -> None:
    # mean .5: e^.5 = 1.65 > 1.2
    logprob = slopes.vector([0.0, -1.0, -1.0], grad=True)
    loss, metrics = gspo(logprob, [1.0, 1.0, 1.0])
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.2, -1.2, -1.0]) and int(metrics["clipped_high"]) == 2
    assert logprob.grad is not None and logprob.grad.tolist() == pytest.approx([0.0, 0.0, -1.0])


@given(st.lists(st.floats(-1.5, -0.5), min_size=3, max_size=3), st.lists(st.sampled_from([-1.0, 0.0, 2.0]), min_size=2, max_size=2))
def test_gspo_is_the_formula_written_out(logprob: list[float], advantage: list[float]) -> None:
    per_token = [advantage[0], advantage[0], advantage[1]]
    expected = []
    for members, a in (([0, 1], advantage[0]), ([2], advantage[1])):
        s = math.exp(sum(logprob[i] + 1.0 for i in members) / len(members))
        expected += [-min(s * a, min(max(s, 0.9), 1.2) * a)] * len(members)
    assert gspo(slopes.vector(logprob), per_token)[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    point = [-0.95, -1.02, -0.97]

    def geometric(p: Tensor) -> Tensor:
        return geometric_mean_loss(p, torch.full_like(p, -1.0), slopes.vector([1.0, 1.0, -2.0]), SEQUENCE, num_sequences=2, clip_log=0.4)[0]

    for function in (lambda p: gspo(p, [1.0, 1.0, -2.0])[0], geometric):
        assert slopes.slope(function, point) == pytest.approx(slopes.difference(function, point), abs=1e-6)


def test_the_geometric_mean_clips_tokens_on_the_side_that_ppo_would() -> None:
    # A > 0: log-ratios 2 and -2 with bound .4: (.4 - 2) / 2 = -.8; A < 0, log-ratio -2: -.4
    logprob = slopes.vector([1.0, -3.0, -3.0])
    loss, metrics = geometric_mean_loss(logprob, torch.full_like(logprob, -1.0), slopes.vector([1.0, 1.0, -1.0]), SEQUENCE, num_sequences=2, clip_log=0.4)
    assert loss.tolist() == pytest.approx([-math.exp(-0.8)] * 2 + [math.exp(-0.4)])
    assert (int(metrics["clipped_high"]), int(metrics["clipped_low"])) == (1, 1)


@given(st.lists(slopes.log_ratios, min_size=3, max_size=3), st.sampled_from([0.0, 1.0, -1.0]))
def test_huge_differences_stay_finite_in_value_and_gradient(log_ratio: list[float], advantage: float) -> None:
    # faults.md 46, 85: bounded in log space
    def sequence_level(p: Tensor) -> Tensor:
        return gspo(p, [advantage] * 3, old=0.0)[0]

    def geometric(p: Tensor) -> Tensor:
        return geometric_mean_loss(p, torch.zeros_like(p), slopes.vector([advantage] * 3), SEQUENCE, num_sequences=2, clip_log=0.4)[0]

    for function in (sequence_level, geometric):
        gradient = slopes.vector(slopes.slope(function, log_ratio))
        assert slopes.finite(function(slopes.vector(log_ratio))) and slopes.finite(gradient)
        if advantage == 0:
            assert not bool(gradient.any())


def test_no_token_keeps_the_graph() -> None:
    empty, none = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    gspo_loss(empty, torch.zeros(0), torch.zeros(0), none, num_sequences=0, clip_low=0.1, clip_high=0.1)[0].sum().backward()
    assert empty.grad is not None
