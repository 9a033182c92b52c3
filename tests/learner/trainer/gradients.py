"""What both the one-rank and the two-rank side of the gradient tests compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer, Update
from learner.trainer.samples import Sample
from learner.trainer.tally import StepResult
from learner.trainer.update import train_step
from tests.learner.trainer import rig

# Choices over the whole batch: ranks must make the same ones, and those that one rank would make.
BATCH_WIDE: dict[str, dict[str, Any]] = {
    "m2po": {"correction": {"mode": "reject", "low": 0.0, "high": 1e6, "second_moment": 0.5}},
    "clip_cov": {"loss": {"kind": "clip_cov", "share": 0.2, "covariance_low": -1.0}},
    "kl_cov": {"loss": {"kind": "kl_cov", "share": 0.2}},
    "gspo": {"name": "gspo"},
}


class Keeping(Optimizer):
    """Keeps the gradients instead of stepping."""

    gradients: dict[str, Tensor]

    def update(self) -> Update:
        self.gradients = {name: whole(p.grad) for name, p in self.parameters.items() if p.grad is not None}
        self.zero_grad()
        return Update(grad_norm=0.0, lr=0.0, skipped=False)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def owner_by(rule: str, sample: Sample, size: int) -> int:
    """How samples are dealt to ranks: groups in turn, samples in turn, or all but one to rank 0."""
    number = int(sample.group_id[1:])
    return {"groups": number % size, "samples": sample.sample_index % size, "lopsided": min(size - 1, int(number == 2))}[rule]


def gradients(
    mesh: DeviceMesh, folder: Path, dtype: torch.dtype, *, row_tokens: int = 40, share_prefix: bool = True, owner: str = "groups", aggregation: str = "token_mean", algorithm: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], StepResult]:
    """Whole gradients of one batch of 3 groups of 4."""
    made = rig.samples(3, 4)
    policy = rig.policy(folder, mesh, dtype)
    optimizer = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
    mine = [s for s in made if owner_by(owner, s, mesh.size()) == dist.get_rank()]
    objective = make_objective(AlgorithmConfig.model_validate({"aggregation": aggregation, **(algorithm or {})}), max_new_tokens=8)
    minibatches = objective.minibatches(rig.entries(made), num=1)
    result = train_step(policy, optimizer, mine, minibatches, objective=objective, row_tokens=row_tokens, share_prefix=share_prefix)
    return optimizer.gradients, result


def on_two_ranks(mesh: DeviceMesh, folders: dict[str, Path], out: Path) -> None:
    """Writes gradients by case; both ranks must agree on all of them."""
    results = {}
    for name, dtype in (("gpt2", torch.float64), ("llama", torch.float32)):
        for owner in ("groups", "samples", "lopsided"):
            grads, result = gradients(mesh, folders[name], dtype, owner=owner)
            results[f"{name} {owner}"] = grads
            results[f"{name} {owner} loss"] = {"loss": torch.tensor(result.loss, dtype=torch.float64), "log_ratio": result.log_ratio.sort().values}
    for name, algorithm in BATCH_WIDE.items():
        grads, result = gradients(mesh, folders["gpt2"], torch.float64, owner="lopsided", algorithm=algorithm)
        results[name] = grads
        results[f"{name} loss"] = {"loss": torch.tensor(result.loss, dtype=torch.float64)}
    if dist.get_rank() == 0:
        torch.save(results, out)
