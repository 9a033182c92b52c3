from __future__ import annotations

import math

import pytest
import torch

from rollout_server.engine import SamplingSpec
from rollout_server.sampling import draw, log_distribution

LOGITS = torch.tensor([2.0, 1.0, 0.0])


def spec(**values: object) -> SamplingSpec:
    return SamplingSpec(**({"temperature": 1.0, "max_new_tokens": 1} | values))  # type: ignore[arg-type]


def test_temperature_scales_logits_not_logprobs() -> None:
    # softmax of [4, 2, 0]: log(1 + e^-2 + e^-4) = 0.142932
    assert log_distribution(LOGITS, spec(temperature=0.5)).tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_top_k_renormalises_over_what_is_left() -> None:
    # [2, 1]: log(1 + e^-1) = 0.313262
    assert log_distribution(LOGITS, spec(top_k=2)).tolist() == pytest.approx([-0.313262, -1.313262, -math.inf], abs=1e-6)


def test_top_p_keeps_the_token_that_crosses_the_bound() -> None:
    # probabilities 0.665, 0.245, 0.090: 0.7 is crossed by the second
    assert log_distribution(LOGITS, spec(top_p=0.7)).tolist() == pytest.approx([-0.313262, -1.313262, -math.inf], abs=1e-6)
    assert log_distribution(LOGITS, spec(top_p=0.6)).tolist() == pytest.approx([0.0, -math.inf, -math.inf], abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw(LOGITS, spec(), generator)[0] for _ in range(4000)]
    for token, probability in enumerate(torch.softmax(LOGITS, -1).tolist()):
        # four standard errors: 4 * sqrt(0.25 / 4000) = 0.032
        assert abs(drawn.count(token) / 4000 - probability) < 0.032


def test_greedy_takes_the_largest() -> None:
    assert draw(LOGITS, spec(temperature=0), torch.Generator()) == (0, pytest.approx(-0.407606, abs=1e-6))
