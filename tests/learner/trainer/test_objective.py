"""Every preset and part really trains, and a user's own functions from outside the repository do too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.presets import PRESETS
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.samples import Sample
from learner.trainer.tally import StepResult
from learner.trainer.update import train_step
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import gradients, whole

TRAINS = sorted(PRESETS.keys() - {"ppo", "remax", "opd"})  # remax is in test_baseline.py; opd is in test_companion.py, with its teacher
PARTS: dict[str, dict[str, Any]] = {
    "opo": {"advantage": {"kind": "length_weighted"}},
    "gpg": {"advantage": {"kind": "gpg"}, "loss": {"kind": "reinforce"}},
    "pass@2": {"advantage": {"kind": "pass_at_k", "k": 2}},
    "best of the group": {"advantage": {"kind": "best_of_group"}},
    "gdpo": {"advantage": {"kind": "several_rewards", "weights": {"right": 1.0, "short": 0.5}}},
    "gmpo": {"loss": {"kind": "geometric_mean"}, "aggregation": "sequence_mean"},
    "dppo": {"loss": {"kind": "dppo_tv", "threshold": 0.2}},
    "dppo kl": {"loss": {"kind": "dppo_kl", "threshold": 0.05}},
    "clip-cov": {"loss": {"kind": "clip_cov", "share": 0.2, "covariance_low": -1.0}},
    "kl-cov": {"loss": {"kind": "kl_cov", "share": 0.2}},
    "icepop": {"old_policy": "recomputed", "correction": {"mode": "mask", "low": 0.5, "high": 5.0}},
    "sequence clip": {"old_policy": "recomputed", "correction": {"level": "sequence", "mode": "clip", "low": 0.5, "high": 2.0, "veto": 1e-6}},
    "geometric reject": {"correction": {"level": "geometric", "mode": "reject", "low": 0.1, "high": 10.0}},
    "m2po": {"correction": {"mode": "reject", "low": 0.0, "high": 1e6, "second_moment": 0.5}},
    "log-linear": {"old_policy": "log_linear", "correction": {"mode": "truncate", "high": 2.0}},
    "kl to the sampler": {"kl": {"coefficient": 0.1, "gradient": "importance"}},
    "entropy bonus": {"entropy_bonus": 0.01},
    "overlong": {"overlong": {"buffer_tokens": 3}, "truncated": "mask"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.gpt2(tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def table(made: list[Sample]) -> list[Any]:
    return [replace(e, reward_parts={"right": e.reward, "short": float(e.sample_index == 1)}, staleness=e.sample_index % 2) for e in rig.entries(made)]


def trained(mesh: DeviceMesh, folder: Path, algorithm: dict[str, Any], *, num_minibatches: int = 2, made: list[Sample] | None = None, **changes: Any) -> tuple[StepResult, dict[str, Tensor]]:
    """One step on three groups of four, and by how much each parameter moved."""
    samples = made or rig.samples(3, 4)
    policy = rig.policy(folder, mesh)
    before = {name: whole(p) for name, p in policy.causal_lm.named_parameters()}
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-2))
    objective = make_objective(AlgorithmConfig.model_validate(algorithm), max_new_tokens=8)
    minibatches = objective.minibatches(table(samples), num=num_minibatches)
    result = train_step(policy, optimizer, samples, minibatches, objective=objective, row_tokens=40, share_prefix=True, **changes)
    return result, {name: whole(p) - before[name] for name, p in policy.causal_lm.named_parameters()}


@pytest.mark.parametrize("algorithm", [{"name": name} for name in TRAINS] + list(PARTS.values()), ids=[*TRAINS, *PARTS])
def test_it_trains(algorithm: dict[str, Any], mesh: DeviceMesh, folder: Path) -> None:
    result, moved = trained(mesh, folder, algorithm)
    assert [update.skipped for update in result.updates] == [False, False]
    assert all(update.grad_norm > 0 for update in result.updates) and all(torch.isfinite(m).all() for m in moved.values())
    assert any(bool(m.any()) for m in moved.values())


@pytest.mark.parametrize("name", TRAINS)
def test_before_the_first_update_every_presets_ratio_is_one(name: str, mesh: DeviceMesh, folder: Path) -> None:
    # faults.md 40, 49: behaviour log-probs from transformers itself, one minibatch, so nothing was updated when the ratio was taken
    made = [replace(s, behaviour=rig.reference_logprobs(folder, s)) for s in rig.samples(3, 4)]
    result, _ = trained(mesh, folder, {"name": name}, num_minibatches=1, made=made)
    assert result.sums["ratio"] / result.sums["targets"] == pytest.approx(1.0, abs=1e-5)
    assert all(result.sums.get(n, 0) == 0 for n in ("clipped_high", "clipped_low", "clipped_dual"))
    assert result.sums.get("correction_weight", result.sums["targets"]) / result.sums["targets"] == pytest.approx(1.0, abs=1e-5)


CUTS = ["gspo", "decoupled_ppo", "dr_grpo"]


@pytest.mark.parametrize("algorithm", [{"name": name} for name in CUTS] + [PARTS["clip-cov"], PARTS["m2po"], PARTS["gmpo"]], ids=[*CUTS, "clip-cov", "m2po", "gmpo"])
def test_the_gradient_does_not_depend_on_how_rows_were_cut(algorithm: dict[str, Any], mesh: DeviceMesh, folder: Path) -> None:
    # faults.md 82: sequence levels, batch-wide choices and constants as well
    one, first = gradients(mesh, folder, torch.float64, row_tokens=10_000, aggregation=algorithm.get("aggregation", "token_mean"), algorithm=algorithm)
    for row_tokens, share in ((1, True), (17, False)):
        other, second = gradients(mesh, folder, torch.float64, row_tokens=row_tokens, share_prefix=share, aggregation=algorithm.get("aggregation", "token_mean"), algorithm=algorithm)
        scale = max(float(g.abs().max()) for g in one.values())
        assert all(float((other[n] - one[n]).abs().max()) <= 1e-9 * scale for n in one)
        assert second.loss == pytest.approx(first.loss, rel=1e-9)


def test_the_recomputed_ratio_starts_from_the_steps_start_in_every_minibatch(mesh: DeviceMesh, folder: Path) -> None:
    # The sampler's log-probs are random here, far from the model's; against the step's start the first minibatch has ratio 1 and
    # the second moves a little by one small update. With the sampler's the mean ratio would be far from 1.
    result, _ = trained(mesh, folder, {"name": "gspo"}, num_minibatches=2)
    assert result.sums["ratio"] / result.sums["targets"] == pytest.approx(1.0, abs=0.2)
    stale, _ = trained(mesh, folder, {"name": "gspo", "old_policy": "behaviour"}, num_minibatches=2)
    assert abs(stale.sums["ratio"] / stale.sums["targets"] - 1) > 0.2


def test_a_flat_batch_trains_nothing_unless_a_term_has_a_gradient_for_it(mesh: DeviceMesh, folder: Path) -> None:
    # faults.md 79
    made = rig.samples(2, 2)
    flat = [replace(e, reward=0.4) for e in rig.entries(made)]
    for algorithm, num_samples in (({"name": "rloo"}, 0), ({"name": "reinforce_pp"}, 0), ({"entropy_bonus": 0.1}, 4), (PARTS["kl to the sampler"], 4)):
        objective = make_objective(AlgorithmConfig.model_validate(algorithm), max_new_tokens=8)
        assert sum(len(m.advantages) for m in objective.minibatches(flat, num=1)) == num_samples


def test_entropy_of_the_metrics_is_that_of_the_distribution(mesh: DeviceMesh, folder: Path) -> None:
    # A bonus so small that nothing else changes; 61 tokens: entropy is under log 61 = 4.11, and near it for a random model
    result, _ = trained(mesh, folder, {"entropy_bonus": 1e-9}, num_minibatches=1)
    assert 3.0 < result.sums["entropy"] / result.sums["targets"] < 4.12


OWN = '''
"""A user's functions."""
import torch


def advantage(groups, *, scale):
    return [scale * (group.rewards - group.rewards.median()) for group in groups]


def loss(tokens, *, bound):
    ratio = (tokens.logprob - tokens.old).exp()
    return -ratio.clamp(max=bound) * tokens.advantage, {"ratio": ratio.detach().sum()}


def short(groups):
    return [group.rewards[:1] for group in groups]


def infinite(groups):
    return [group.rewards / 0 for group in groups]


def scalar(tokens):
    return tokens.logprob.sum(), {}
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def custom(advantage: str, loss: str) -> dict[str, Any]:
    return {
        "advantage": {"kind": "custom", "function": f"my_algorithm:{advantage}", "options": {"scale": 2.0} if advantage == "advantage" else {}},
        "loss": {"kind": "custom", "function": f"my_algorithm:{loss}", "options": {"bound": 1.5} if loss == "loss" else {}},
    }


@pytest.mark.usefixtures("own")
def test_a_users_own_advantage_and_loss_train_by_configuration_alone(mesh: DeviceMesh, folder: Path) -> None:
    algorithm = custom("advantage", "loss")
    objective = make_objective(AlgorithmConfig.model_validate(algorithm), max_new_tokens=8)
    (minibatch,) = objective.minibatches(rig.entries(rig.samples(1, 3)), num=1)
    assert dict(minibatch.advantages) == {("g0", 0): 2.0, ("g0", 1): 0.0, ("g0", 2): 0.0}  # rewards 1, 0, 0: median 0, scale 2; all are computed
    result, moved = trained(mesh, folder, algorithm)
    assert len(result.updates) == 2 and any(bool(m.any()) for m in moved.values())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("advantage", "message"), [("short", "must give one for each"), ("infinite", "must be finite")])
def test_an_advantage_that_does_not_fit_is_refused(advantage: str, message: str) -> None:
    objective = make_objective(AlgorithmConfig.model_validate(custom(advantage, "loss")), max_new_tokens=8)
    with pytest.raises(ValueError, match=message):
        objective.minibatches(rig.entries(rig.samples(1, 3)), num=1)


@pytest.mark.usefixtures("own")
def test_a_loss_that_is_not_of_each_token_is_refused(mesh: DeviceMesh, folder: Path) -> None:
    with pytest.raises(ValueError, match="loss of each token"):
        trained(mesh, folder, custom("advantage", "scalar"))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("name", "message"), [("my_algorithm:nothing", "has no function nothing; it has advantage"), ("no_such_module:loss", "cannot be imported.*PYTHONPATH")])
def test_a_function_that_cannot_be_found_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_objective(AlgorithmConfig.model_validate({"loss": {"kind": "custom", "function": name}}), max_new_tokens=8)
