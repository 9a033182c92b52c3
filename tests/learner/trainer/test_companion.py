"""Second models: a reference that a KL pulls towards, frozen or following, and a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from learner.algorithm_config import AlgorithmConfig
from learner.config import LearnerConfig, OptimizerConfig
from learner.trainer.companion import Companion, Following
from learner.trainer.companions import followed, load_companions
from learner.trainer.model import Policy, load_policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import Row, WeightedSample, dummy_row, pack
from learner.trainer.tally import StepResult
from learner.trainer.update import train_step
from learner.trainer.world import World
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import Keeping, whole

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.gpt2(tmp_path_factory.mktemp("model") / "gpt2")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def companion(folder: Path, mesh: DeviceMesh, **following: Any) -> Companion:
    return Companion(rig.policy(folder, mesh), following=Following(**following), device=CPU, offload=True)


def step(policy: Policy, algorithm: dict[str, Any], companions: dict[Any, Companion], *, updates: int = 1, keeping: bool = False) -> tuple[StepResult, Optimizer]:
    samples = rig.samples(3, 4)
    optimizer = (Keeping if keeping else Optimizer)(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-3))
    objective = make_objective(AlgorithmConfig.model_validate(algorithm), max_new_tokens=8)
    for _ in range(updates):
        minibatches = objective.minibatches(rig.entries(samples), num=1)
        result = train_step(policy, optimizer, samples, minibatches, objective=objective, row_tokens=40, share_prefix=True, companions=companions)
    return result, optimizer


def move(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.add_(0.125)


def test_an_offloaded_one_is_on_the_device_for_its_passes_alone(folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Policy, "to", lambda self, where: told.append(str(where)))

    def passed(self: Policy, row: Row) -> torch.Tensor:
        told.append("pass")
        return torch.zeros(row.num_targets)

    monkeypatch.setattr(Policy, "forward", passed)
    rows = [[dummy_row(), dummy_row()]]
    away = Companion(rig.policy(folder, mesh), following=Following(), device=torch.device("meta"), offload=True)
    away.logprobs(rows)
    assert told == ["cpu", "meta", "pass", "pass", "cpu"]
    told.clear()
    Companion(rig.policy(folder, mesh), following=Following(), device=torch.device("meta"), offload=False).logprobs(rows)
    assert told == ["pass", "pass"]


@pytest.mark.parametrize(("following", "expected"), [({}, [0.0, 0.0]), ({"every_steps": 2}, [0.0, 0.25]), ({"decay": 0.5}, [0.0625, 0.15625])])
def test_it_follows_the_policy_as_told(following: dict[str, Any], expected: list[float], folder: Path, mesh: DeviceMesh) -> None:
    # the policy moves by .125 a step; ema .5: .0625, then .0625 / 2 + .25 / 2 = .15625
    policy, second = rig.policy(folder, mesh), companion(folder, mesh, **following)
    first = whole(next(policy.causal_lm.parameters()))
    for number, distance in enumerate(expected, start=1):
        move(policy)
        second.follow(policy, number)
        found = whole(next(second._policy.causal_lm.parameters())) - first
        torch.testing.assert_close(found, torch.full_like(found, distance))
    assert bool(second.state()) is bool(following)  # only what follows must be saved


def test_sharded_it_is_followed_and_saved_by_its_shards_after_it_has_judged_too(folder: Path, mesh: DeviceMesh) -> None:
    # bfloat16 against float32 master weights: sharded over one rank, as over several
    policy, second = (load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=rig.TEMPERATURE) for _ in range(2))
    judge = Companion(second, following=Following(decay=0.5), device=CPU, offload=False)
    first = {name: whole(tensor) for name, tensor in judge.state().items()}
    move(policy)
    judge.logprobs([[dummy_row()]])
    judge.follow(policy, 1)
    assert all(isinstance(tensor, DTensor) for tensor in judge.state().values())
    for name, tensor in judge.state().items():  # the policy moved by .125, half of it is taken over
        torch.testing.assert_close(whole(tensor), first[name] + 0.0625)


def test_its_logprobs_are_those_of_its_own_weights(folder: Path, mesh: DeviceMesh) -> None:
    samples = rig.samples(2, 2)
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in samples], row_tokens=40, share_prefix=True)
    expected = {float(b): float(lp) for s in samples for b, lp in zip(s.behaviour, rig.reference_logprobs(folder, s), strict=True)}
    (values,) = companion(folder, mesh).logprobs([rows])
    for row, value in zip(rows, values, strict=True):
        assert value.tolist() == pytest.approx([expected[float(b)] for b in row.behaviour], abs=1e-5) and not value.requires_grad


def test_a_reference_equal_to_the_policy_pulls_nowhere(folder: Path, mesh: DeviceMesh) -> None:
    _, with_kl = step(rig.policy(folder, mesh), {"kl": {"coefficient": 5.0, "reference": "frozen"}}, {"reference": companion(folder, mesh)}, keeping=True)
    _, without = step(rig.policy(folder, mesh), {}, {}, keeping=True)
    assert isinstance(with_kl, Keeping) and isinstance(without, Keeping)
    for name, gradient in without.gradients.items():
        torch.testing.assert_close(with_kl.gradients[name], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_pull_keeps_the_policy_nearer_to_its_reference(where: str, folder: Path, mesh: DeviceMesh) -> None:
    # Rewards that are all equal leave only the pull: started away from the reference, the policy comes back.
    policy, second = rig.policy(folder, mesh), companion(folder, mesh)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    samples = rig.samples(3, 4)
    rows = pack([WeightedSample(sample=s, advantage=0.0) for s in samples], row_tokens=10_000, share_prefix=True)

    def distance() -> float:
        with torch.no_grad():
            return float(torch.cat([policy(row) - ref for row, ref in zip(rows, second.logprobs([rows])[0], strict=True)]).square().mean())

    before = distance()
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-3))
    estimator = {"estimator": "k1"} if where == "reward" else {}
    objective = make_objective(AlgorithmConfig.model_validate({"loss": {"kind": "reinforce"}, "kl": {"coefficient": 1.0, "reference": "frozen", "where": where, **estimator}}), max_new_tokens=8)
    flat = [replace(e, reward=1.0) for e in rig.entries(samples)]
    for _ in range(6):
        with torch.no_grad():  # on-policy: the sampler is the policy of this moment
            now = {float(b): float(lp) for row in rows for b, lp in zip(row.behaviour, policy(row), strict=True)}
        drawn = [replace(s, behaviour=torch.tensor([now.get(float(b), -1.0) for b in s.behaviour])) for s in samples]
        train_step(policy, optimizer, drawn, objective.minibatches(flat, num=1), objective=objective, row_tokens=40, share_prefix=True, companions={"reference": second})
    # In the reward the pull is of whole samples (what comes after a token counts for it), on these tokens a coarser force than in the loss.
    assert distance() < before * (0.9 if where == "loss" else 1.0)


def test_distillation_moves_the_student_to_its_teacher(folder: Path, mesh: DeviceMesh) -> None:
    policy, teacher = rig.policy(folder, mesh), companion(folder, mesh)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    samples = rig.samples(3, 4)
    rows = pack([WeightedSample(sample=s, advantage=0.0) for s in samples], row_tokens=10_000, share_prefix=True)

    def gap() -> float:
        with torch.no_grad():
            return float(torch.cat([policy(row) - t for row, t in zip(rows, teacher.logprobs([rows])[0], strict=True)]).square().mean())

    before = gap()
    algorithm = {"name": "opd", "teacher": {"model": str(folder)}, "correction": None}
    result, _ = step(policy, algorithm, {"teacher": teacher}, updates=8)
    assert gap() < 0.7 * before and result.sums["targets"] == sum(s.num_trained_tokens for s in samples)


def settings(folder: Path, algorithm: dict[str, Any], tmp_path: Path) -> LearnerConfig:
    return LearnerConfig.model_validate({"run_dir": tmp_path, "model": str(folder), "data": {"prompts": "p"}, "algorithm": algorithm, "sampling": {"temperature": rig.TEMPERATURE}})


def test_the_configured_models_are_loaded_and_a_following_one_is_saved(folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    world = World(rank=0, size=1, device=CPU, mesh=mesh, incarnation=1)
    policy = rig.policy(folder, mesh)
    for algorithm, names, saved in (
        ({}, set(), False),
        ({"kl": {"coefficient": 0.1}}, set(), False),
        ({"kl": {"coefficient": 0.1, "reference": "frozen"}}, {"reference"}, False),
        ({"kl": {"coefficient": 0.1, "reference": "ema", "decay": 0.9}}, {"reference"}, True),
        ({"name": "opd", "teacher": {"model": str(folder)}}, {"teacher"}, False),
    ):
        made = load_companions(settings(folder, algorithm, tmp_path), policy, folder, world)
        assert set(made) == names and bool(followed(made)) is saved


def test_a_teacher_of_another_vocabulary_is_refused(folder: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "VOCABULARY", 67)
    other = rig.gpt2(tmp_path / "other")
    world = World(rank=0, size=1, device=CPU, mesh=mesh, incarnation=1)
    with pytest.raises(ValueError, match="the teacher model has 67 tokens, the policy 61"):
        load_companions(settings(folder, {"name": "opd", "teacher": {"model": str(other)}}, tmp_path), rig.policy(folder, mesh), folder, world)
