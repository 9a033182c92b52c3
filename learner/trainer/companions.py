"""The second models that a configuration asks for, loaded and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.trainer.adamw8 import Packed
from learner.trainer.companion import Companion, Following
from learner.trainer.critic import Critic, load_value_model
from learner.trainer.engine import engine_of
from learner.trainer.model import Policy, load_policy
from learner.trainer.optimizer import Optimizer
from learner.trainer.world import World
from protos.identity import resolve_model

Companions = dict[Literal["reference", "teacher"], Companion]


def load_companions(config: LearnerConfig, policy: Policy, model_dir: Path, world: World) -> Companions:
    """None for most algorithms. Args: model_dir, the folder that the policy starts from. Collective. Raises ValueError for a model that does not fit."""
    kl, teacher = config.algorithm.kl, config.algorithm.teacher
    made: Companions = {}
    if kl is not None and kl.reference != "behaviour":
        folder = resolve_model(kl.model) if kl.model else model_dir
        made["reference"] = _load(config, folder, model_dir, world, Following(every_steps=kl.every_steps, decay=kl.decay), kl.offload)
    if teacher is not None:
        made["teacher"] = _load(config, resolve_model(teacher.model), model_dir, world, Following(), teacher.offload)
    for name, companion in made.items():
        companion.check_same_vocabulary(policy, f"the {name} model")
    return made


def followed(companions: Companions, critic: Critic | None = None) -> dict[str, Tensor | Packed]:
    """What a cut must hold beside the policy: a reference that follows it, and a critic. Memory shared with the live ones, as they lie now."""
    reference = dict(companions["reference"].state()) if "reference" in companions else {}
    return {**reference, **(critic.state() if critic is not None else {})}


def load_critic(config: LearnerConfig, policy: Policy, model_dir: Path, world: World) -> Critic | None:
    """The configured critic; None for an algorithm without one. Collective. Raises ValueError for a model that does not fit."""
    wanted = config.critic_in_use
    if wanted is None:
        return None
    folder = resolve_model(wanted.model) if wanted.model else model_dir
    model = load_value_model(folder, mesh=world.mesh, compute_dtype=getattr(torch, config.trainer.compute_dtype), engine=engine_of(config.trainer, world.device))
    sizes = [cast(Tensor, module.get_input_embeddings().weight).shape[0] for module in (policy.causal_lm, model.backbone)]  # type: ignore[operator]
    if sizes[0] != sizes[1]:
        raise ValueError(f"critic.model has {sizes[1]} tokens, the policy {sizes[0]}: both read the same ids; use a model of the same family")
    return Critic(model, Optimizer(model.named_parameters(), wanted.optimizer, total_updates=config.total_updates), clip=wanted.clip)


def _load(config: LearnerConfig, folder: Path, model_dir: Path, world: World, following: Following, offload: bool) -> Companion:
    """Over the ids that the policy's engine draws, whatever padding this model's own head has."""
    engine = replace(engine_of(config.trainer, world.device), offload=False)  # a companion is moved whole, between its passes
    model = load_policy(folder, mesh=world.mesh, compute_dtype=getattr(torch, config.trainer.compute_dtype), temperature=config.sampling.temperature, engine=engine, tokens_of=model_dir)
    return Companion(model, following=following, device=world.device, offload=offload and world.device.type != "cpu")
