"""The second models that a configuration asks for, loaded and checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from learner.config import LearnerConfig
from learner.trainer.companion import Companion, Following
from learner.trainer.engine import engine_of
from learner.trainer.model import Policy, load_policy
from learner.trainer.world import World
from protos.identity import resolve_model

Companions = dict[Literal["reference", "teacher"], Companion]


def load_companions(config: LearnerConfig, policy: Policy, model_dir: Path, world: World) -> Companions:
    """None for most algorithms. Args: model_dir, the folder that the policy starts from. Collective. Raises ValueError for a model that does not fit."""
    kl, teacher = config.algorithm.kl, config.algorithm.teacher
    made: Companions = {}
    if kl is not None and kl.reference != "behaviour":
        folder = resolve_model(kl.model) if kl.model else model_dir
        made["reference"] = _load(config, folder, world, Following(every_steps=kl.every_steps, decay=kl.decay), kl.offload)
    if teacher is not None:
        made["teacher"] = _load(config, resolve_model(teacher.model), world, Following(), teacher.offload)
    for name, companion in made.items():
        companion.check_same_vocabulary(policy, f"the {name} model")
    return made


def followed(companions: Companions) -> dict[str, Tensor]:
    """Weights that a cut must hold beside the policy's: those of a reference that follows it. Memory shared with the live ones, as they lie now."""
    return dict(companions["reference"].state()) if "reference" in companions else {}


def _load(config: LearnerConfig, folder: Path, world: World, following: Following, offload: bool) -> Companion:
    engine = replace(engine_of(config.trainer, world.device), offload=False)  # a companion is moved whole, between its passes
    model = load_policy(folder, mesh=world.mesh, compute_dtype=getattr(torch, config.trainer.compute_dtype), temperature=config.sampling.temperature, engine=engine)
    return Companion(model, following=following, device=world.device, offload=offload and world.device.type != "cpu")
