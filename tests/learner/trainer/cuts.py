"""One batch cut in ten ways, for actor and critic: what every rank of every cut computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner.algorithm_config import AlgorithmConfig
from learner.config import OptimizerConfig
from learner.trainer.critic import Critic, ValueModel, load_value_model
from learner.trainer.loading import own_block
from learner.trainer.model import load_policy
from learner.trainer.objective import make_objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.update import train_step
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import Keeping, owner_by, whole
from tests.learner.trainer.two_ranks import give_gradients

PPO = AlgorithmConfig.model_validate({"name": "ppo", "kl": None, "advantage": {"gamma": 0.97, "lam": 0.9}})


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Example: Cut(ranks=2, row_tokens=17, owner="samples")"""

    ranks: int = 1
    row_tokens: int = 10_000
    share_prefix: bool = True
    owner: str = "groups"  # groups whole, "samples" split over ranks, "lopsided" nearly all to rank 0
    backwards: bool = False  # samples in the reverse order


CUTS = {
    "one row": Cut(),
    "a document a row": Cut(row_tokens=1),
    "not packed": Cut(row_tokens=1, share_prefix=False),
    "small rows, backwards": Cut(row_tokens=17, backwards=True),
    "two ranks, groups whole": Cut(ranks=2, row_tokens=40),
    "two ranks, groups split": Cut(ranks=2, row_tokens=17, owner="samples"),
    "two ranks, lopsided, not shared": Cut(ranks=2, row_tokens=40, owner="lopsided", share_prefix=False),
    "three ranks, groups whole, backwards": Cut(ranks=3, row_tokens=40, backwards=True),
    "four ranks, groups split": Cut(ranks=4, row_tokens=30, owner="samples"),
    "four ranks, lopsided, two with nothing": Cut(ranks=4, row_tokens=1, owner="lopsided"),
}
PRECISIONS = {"gpt2": (torch.float64, 1e-10), "llama": (torch.float32, 1e-5)}  # relative to the largest gradient


def critic_of(folder: Path, mesh: DeviceMesh, dtype: torch.dtype) -> tuple[Critic, Keeping]:
    """Its head away from 0, or the backbone would have no gradient."""
    model = load_value_model(folder, mesh=mesh, compute_dtype=dtype, master_dtype=dtype)
    set_head(model)
    optimizer = Keeping(model.named_parameters(), OptimizerConfig())
    return Critic(model, optimizer, clip=0.2), optimizer


def set_head(model: ValueModel) -> None:
    width = model.head.weight.shape[1]
    whole = torch.linspace(-0.3, 0.3, width)[None]
    with torch.no_grad():
        local, offset = own_block(model.head.weight.detach())
        if local.numel():
            local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))])


def gradients(mesh: DeviceMesh, folder: Path, dtype: torch.dtype, cut: Cut) -> dict[str, Tensor]:
    """Whole gradients of actor and critic, and the loss."""
    made = rig.samples(3, 4)
    mine = [s for s in made if owner_by(cut.owner, s, mesh.size()) == dist.get_rank()]
    policy = rig.policy(folder, mesh, dtype)
    actor = Keeping(policy.causal_lm.named_parameters(), OptimizerConfig())
    critic, keeper = critic_of(folder, mesh, dtype)
    objective = make_objective(PPO, max_new_tokens=8)
    minibatches = objective.minibatches(rig.entries(made), num=1)
    result = train_step(
        policy, actor, mine[::-1] if cut.backwards else mine, minibatches, objective=objective, row_tokens=cut.row_tokens, share_prefix=cut.share_prefix, critic=critic
    )  # fmt: skip
    sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in result.sums.items() if name.startswith(("value_", "returns"))}
    return {**{f"actor {n}": g for n, g in actor.gradients.items()}, **{f"critic {n}": g for n, g in keeper.gradients.items()}, "loss": torch.tensor(result.loss), **sums}


def on_ranks(mesh: DeviceMesh, folders: dict[str, Path], out: Path) -> None:
    """Every cut for as many ranks as there are."""
    found: dict[str, Any] = {}
    for name, cut in CUTS.items():
        if cut.ranks == mesh.size():
            for model, (dtype, _) in PRECISIONS.items():
                found[f"{model}: {name}"] = gradients(mesh, folders[model], dtype, cut)
    if dist.get_rank() == 0:
        torch.save(found, out)


def muon_update(mesh: DeviceMesh, folder: Path) -> dict[str, Tensor]:
    """Weights after two Muon updates with the same whole gradients at any world size, the first layer frozen."""
    policy = load_policy(folder, mesh=mesh, compute_dtype=torch.float32, temperature=rig.TEMPERATURE, freeze=[r"layers\.0\."])
    optimizer = Optimizer(policy.causal_lm.named_parameters(), OptimizerConfig(kind="muon", lr=0.02, weight_decay=0.1))
    for seed in (1, 2):
        give_gradients(optimizer, seed)
        optimizer.update()
    state = {f"state {name}": whole(value) for name, value in optimizer.state().items()}
    return {**{name: whole(parameter) for name, parameter in policy.causal_lm.named_parameters()}, **state}


def muon_on_ranks(mesh: DeviceMesh, folder: Path, out: Path) -> None:
    found = muon_update(mesh, folder)
    if dist.get_rank() == 0:
        torch.save(found, out)
