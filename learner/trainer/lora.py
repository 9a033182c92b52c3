"""Low-rank adapters beside frozen weights (peft): only they have gradients and moments; replicas get the merged weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from learner.config import LoraConfig
from learner.trainer.loading import on_meta, own_block
from learner.weights.lora import targets_of


def add_adapters(causal_lm: nn.Module, config: LoraConfig) -> None:
    """Wraps the target modules of a model on meta; every other parameter is frozen. Raises ValueError without peft, and when no module has a target's name."""
    try:
        import peft
    except ImportError as error:
        raise ValueError('trainer.lora needs the package peft: pip install ".[lora]" in a clone of headrace') from error
    alpha: Any = config.alpha  # peft says int and takes any number
    options = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=list(config.targets), init_lora_weights=False)
    try:
        with on_meta():
            peft.inject_adapter_in_model(options, causal_lm)
    except ValueError as error:
        raise ValueError(f"trainer.lora.targets={list(config.targets)}: {error}") from error


def start_adapters(model: nn.Module, *, seed: int) -> None:
    """A uniform within ±1/√in, B zero (Hu et al. 2021, arXiv 2106.09685, section 4.1), so that the model begins as it was; alike at any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, target in sorted(targets_of(model).items()):
            bound = 1 / math.sqrt(target.a.shape[1])
            whole = torch.empty(target.a.shape).uniform_(-bound, bound, generator=generator)
            local, offset = own_block(target.a.detach())
            local.copy_(whole[tuple(slice(start, start + length) for start, length in zip(offset, local.shape, strict=True))])
            own_block(target.b.detach())[0].zero_()
