"""What ranks do in the test of 8-bit moments over world sizes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig

from learner.config import OptimizerConfig
from learner.trainer.adamw import local
from learner.trainer.checkpoint import _copy, restore, training_state
from learner.trainer.optimizer import Optimizer
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole
from tests.learner.trainer.two_ranks import give_gradients

SETTINGS = OptimizerConfig(kind="adamw_8bit", lr=1e-2)


def model(folder: Path) -> Path:
    """Shards of 4,096 elements and more at four ranks: moments of matrices are codes at every world size here."""
    return rig.saved(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, initializer_range=0.2), folder)


def save(mesh: DeviceMesh, folder: Path, out: Path) -> None:
    """Three updates and a cut; then the same cut restored here, and one more update of both."""
    policy = rig.policy(folder, mesh)
    optimizer = Optimizer(policy.causal_lm.named_parameters(), SETTINGS)
    for seed in (1, 2, 3):
        give_gradients(optimizer, seed)
        optimizer.update()
    dcp.save(_copy(training_state(policy.causal_lm, optimizer, 3), None), checkpoint_id=out / "cut")
    moments = {name: whole(value) for name, value in _copy(optimizer.packed(), None).items()}
    sharded = {name: isinstance(value.moment, DTensor) and hasattr(local(value.moment), "codes") for name, value in optimizer.packed().items()}
    after, again = next_update(optimizer), resumed(mesh, folder, out / "cut")["weights"]
    if dist.get_rank() == 0:
        torch.save({"moments": moments, "sharded": sharded, "after": after, "again": again}, out / "saved")


def resume(mesh: DeviceMesh, folder: Path, out: Path) -> None:
    found = resumed(mesh, folder, out / "cut")
    if dist.get_rank() == 0:
        torch.save(found, out / f"resumed-{mesh.size()}")


def resumed(mesh: DeviceMesh, folder: Path, cut: Path) -> dict[str, dict[str, Tensor]]:
    """Moments right after a restore, and weights after the next update."""
    policy = rig.policy(folder, mesh)
    optimizer = Optimizer(policy.causal_lm.named_parameters(), SETTINGS)
    assert restore(cut, policy.causal_lm, optimizer) == 3 and optimizer.num_updates == 3
    moments = {name: whole(value) for name, value in _copy(optimizer.packed(), None).items()}
    return {"moments": moments, "weights": next_update(optimizer)}


def next_update(optimizer: Optimizer) -> dict[str, Tensor]:
    give_gradients(optimizer, 4)
    optimizer.update()
    return {name: whole(parameter) for name, parameter in optimizer.parameters.items()}
