"""Before any update every loss has ratio 1 and the plain policy gradient, whatever its trust region (faults.md 40, 49)."""

from __future__ import annotations

import pytest
import torch

from learner.algorithm_config import AlgorithmConfig
from learner.algorithms.tokens import Tokens
from learner.trainer.objective import loss_function
from tests.learner.algorithms import slopes

LOSSES = [
    {"kind": "clip"}, {"kind": "gspo"}, {"kind": "cispo"}, {"kind": "sapo"}, {"kind": "geometric_mean"}, {"kind": "dppo_tv", "threshold": 0.1},
    {"kind": "dppo_kl", "threshold": 0.1}, {"kind": "clip_cov"}, {"kind": "kl_cov"}, {"kind": "reinforce"},
]  # fmt: skip


@pytest.mark.parametrize("config", LOSSES, ids=lambda c: c["kind"])
def test_ratio_is_one_and_the_gradient_is_minus_the_advantage(config: dict[str, object]) -> None:
    at, advantage = [-0.5, -3.0, -1.0, -7.0], slopes.vector([1.5, 1.5, -0.5, -0.5])
    function = loss_function(AlgorithmConfig.model_validate({"loss": config}).loss)
    logprob = slopes.vector(at, grad=True)
    fixed = logprob.detach()
    tokens = Tokens(
        logprob=logprob, old=fixed, behaviour=fixed, advantage=advantage, sequence=torch.tensor([0, 0, 1, 1]), num_sequences=2, selected=torch.zeros(4, dtype=torch.bool)
    )  # fmt: skip
    loss, sums = function(tokens)
    loss.sum().backward()
    assert float(sums["ratio"]) == pytest.approx(4.0)
    assert all(int(sums.get(name, torch.zeros(()))) == 0 for name in ("clipped_high", "clipped_low", "clipped_dual"))
    assert logprob.grad is not None and logprob.grad.tolist() == pytest.approx((-advantage).tolist())
