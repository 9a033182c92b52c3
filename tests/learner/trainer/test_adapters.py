"""LoRA: adapters alone are trained, and what replicas get is what the trainer computes with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from learner.algorithm_config import AlgorithmConfig
from learner.config import LoraConfig, OptimizerConfig, TrainerConfig
from learner.trainer.model import Policy, load_policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import WeightedSample, pack
from learner.trainer.update import train_step
from learner.weights.lora import base_parameters, targets_of
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole

LORA = LoraConfig(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


def adapted(folder: Path, mesh: DeviceMesh, lora: LoraConfig = LORA, **more: Any) -> Policy:
    return load_policy(folder, mesh=mesh, compute_dtype=torch.float32, temperature=rig.TEMPERATURE, lora=lora, seed=3, **more)


def test_adapters_alone_are_trained_and_served_merged(folder: Path, mesh: DeviceMesh) -> None:
    policy, plain = adapted(folder, mesh), rig.policy(folder, mesh)
    made = rig.samples(3, 4)
    rows = pack([WeightedSample(sample=s, advantage=1.0) for s in made], row_tokens=40, share_prefix=True)
    with torch.no_grad():
        assert all(torch.equal(policy(row), plain(row)) for row in rows)  # B = 0: it begins as it was
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(lr=1e-2))
    assert len(optimizer.parameters) == 2 * 2 * 3 and all(".lora_" in name for name in optimizer.parameters)
    objective = make_objective(AlgorithmConfig(), max_new_tokens=8)
    for _ in range(3):
        train_step(policy, optimizer, made, objective.minibatches(rig.entries(made), num=1), objective=objective, row_tokens=40, share_prefix=True)
    before = {name: p.detach().clone() for name, p in plain.causal_lm.named_parameters()}
    assert all(torch.equal(whole(p), before[name]) for name, p in base_parameters(policy.causal_lm))
    with torch.no_grad():  # W + alpha / rank B A on a plain model
        for name, target in targets_of(policy.causal_lm).items():
            plain.causal_lm.get_parameter(f"{name}.weight").add_(target.b.detach() @ target.a.detach(), alpha=8.0 / 4)
        assert max(float((policy(row) - plain(row)).abs().max()) for row in rows) < 1e-5
        assert any(not torch.equal(p, before[name]) for name, p in plain.causal_lm.named_parameters())


def test_adapters_begin_alike_sharded_or_not(folder: Path, mesh: DeviceMesh) -> None:
    sharded = load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=1.0, lora=LORA, seed=3)
    one, other = ({name: whole(p) for name, p in policy.causal_lm.named_parameters()} for policy in (adapted(folder, mesh), sharded))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(bool(value.any()) for name, value in one.items() if "lora_A" in name) and not any(bool(value.any()) for name, value in one.items() if "lora_B" in name)


def test_a_target_that_no_module_has_and_two_kinds_of_freezing_are_refused(folder: Path, mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"trainer.lora.targets=\['nothing'\]"):
        adapted(folder, mesh, LoraConfig(targets=("nothing",)))
    with pytest.raises(ValueError, match=r"trainer.freeze=\['embed'\] with trainer.lora"):
        TrainerConfig(lora=LORA, freeze=("embed",))
