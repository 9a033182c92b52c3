"""The factor of an adaptive KL coefficient: worked by hand, the same for all data sets, applied to loss and reward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from learner.algorithm_config import AlgorithmConfig, KlConfig
from learner.config import LearnerConfig
from learner.trainer.kl_control import KlControl
from learner.trainer.objective import make_objective, objective_of_run
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.table import Counts
from tests.learner.trainer import rig

ADAPTIVE = {"coefficient": 0.1, "adaptive": {"target": 0.01, "horizon_steps": 10}}


@pytest.mark.parametrize(("kl", "tokens", "factor"), [
    (0.4, 20.0, 1.02),  # .02 a token is twice the target: 1 + .2 / 10, not 1 + 1 / 10
    (0.1, 20.0, 0.98),  # .005: half of it
    (0.22, 20.0, 1.01),  # .011 is a tenth over: 1 + .1 / 10
    (0.0, 0.0, 1.0),  # a step without a token
])  # fmt: skip
def test_the_factor_moves_by_the_relative_error_within_a_fifth_over_the_horizon(kl: float, tokens: float, factor: float) -> None:
    config = KlConfig.model_validate(ADAPTIVE)
    control = KlControl(config)
    control.follow({"kl": kl, "kl_tokens": tokens})
    assert control.factor == pytest.approx(factor) and control.coefficient(config) == pytest.approx(0.1 * factor)


def test_a_fixed_coefficient_never_moves_and_is_in_no_cut() -> None:
    config = KlConfig.model_validate({"coefficient": 0.1})
    for control in (KlControl(config), KlControl()):
        control.follow({"kl": 9.0, "kl_tokens": 1.0})
        assert (control.factor, control.coefficient(config), control.state()) == (1.0, 0.1, {})


def test_what_a_cut_holds_shares_memory_so_that_loading_writes_into_it() -> None:
    control = KlControl(KlConfig.model_validate(ADAPTIVE))
    control.state()["kl_factor"].fill_(1.5)
    assert control.factor == 1.5


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_term_is_multiplied_by_the_factor_and_measured(where: str) -> None:
    kl = {**ADAPTIVE, "where": where, "reference": "frozen", "estimator": "k2"}
    objective = make_objective(AlgorithmConfig.model_validate({"kl": kl}), max_new_tokens=8)
    (row,) = pack([WeightedSample(sample=sample, advantage=0.0) for sample in rig.samples(1, 2)], row_tokens=64, share_prefix=True)
    row = row.__class__(**{**{name: getattr(row, name) for name in row.__slots__}, "reference": row.behaviour - 0.2})
    counts = Counts(num_tokens=row.num_targets, num_sequences=2)
    before, sums = objective.row_loss(row, row.behaviour.clone(), None, counts)
    assert float(sums["kl"]) == pytest.approx(0.02 * row.num_targets, rel=1e-4) and int(sums["kl_tokens"]) == row.num_targets  # .2^2 / 2
    objective.control.state()["kl_factor"].fill_(3.0)
    after, _ = objective.row_loss(row, row.behaviour.clone(), None, counts)
    assert float(before) != 0.0 and float(after) == pytest.approx(3 * float(before), rel=1e-4)


def test_data_sets_share_the_factor_and_may_not_adapt_on_their_own() -> None:
    data: dict[str, Any] = {"sets": {"a": {"prompts": "p", "algorithm": {"kl": {"coefficient": 0.5}}}, "b": {"prompts": "q"}}}
    made = LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": data, "algorithm": {"kl": ADAPTIVE}})
    objective = objective_of_run(made)
    assert all(one.control is objective.control for one in objective.sets.values())
    data["sets"]["a"]["algorithm"]["kl"] = {"coefficient": 0.5, "adaptive": {"target": 0.5}}
    with pytest.raises(ValidationError, match="one factor follows the KL of the whole run"):
        LearnerConfig.model_validate({"run_dir": "r", "model": "m", "data": data, "algorithm": {"kl": ADAPTIVE}})
    assert torch.is_tensor(objective.control.state()["kl_factor"])
