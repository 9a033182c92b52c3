"""Distillation by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithms.distillation import distillation_advantages, reverse_kl
from learner.algorithms.reinforce import reinforce_loss
from tests.learner.algorithms import slopes


def test_a_token_that_the_teacher_likes_better_is_encouraged() -> None:
    assert distillation_advantages(slopes.vector([-2, -0.5]), slopes.vector([-1, -3])).tolist() == [1.0, -2.5]
    assert not distillation_advantages(slopes.vector([-2.0], grad=True), slopes.vector([-1.0])).requires_grad


def test_reverse_kl_by_hand() -> None:
    # p .5 .5, t .8 .2: .5 log(.5/.8) + .5 log(.5/.2) = .2231436
    assert float(reverse_kl(slopes.vector([0, 0])[None], slopes.vector([math.log(0.8), math.log(0.2)])[None])) == pytest.approx(0.2231436)


@given(st.lists(st.tuples(slopes.numbers, slopes.numbers), min_size=2, max_size=5))
def test_the_sampled_form_has_the_gradient_of_the_exact_one_in_expectation(logits: list[tuple[float, float]]) -> None:
    student, teacher = [s for s, _ in logits], slopes.vector([t for _, t in logits])

    def sampled(z: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(z, 0)
        advantage = distillation_advantages(log_p, torch.log_softmax(teacher, 0))
        return (log_p.detach().exp() * reinforce_loss(log_p, log_p.detach(), advantage)[0]).sum()

    exact = slopes.difference(lambda z: reverse_kl(z[None], teacher[None]), student)
    assert slopes.slope(sampled, student) == pytest.approx(exact, abs=1e-5)


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="one vocabulary"):
        reverse_kl(torch.zeros(1, 3), torch.zeros(1, 4))
