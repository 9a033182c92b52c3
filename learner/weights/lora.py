"""A model under peft's LoRA as what replicas get: merged tensors, or the adapter alone. The trainer's own weights are never touched.

peft wraps a target module: its weight becomes `...q_proj.base_layer.weight`, beside `...q_proj.lora_A.default.weight` and `lora_B`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_PREFIX, _BASE = "base_model.model.", ".base_layer."


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One module under LoRA. Example: Target(module="model.layers.0.self_attn.q_proj", a=..., b=..., scaling=2.0)"""

    module: str  # Hugging Face name
    a: nn.Parameter  # [rank, in]
    b: nn.Parameter  # [out, rank], sharded as the weight's rows are
    scaling: float


def served_name(name: str) -> str:
    """The Hugging Face name of a parameter of a peft model."""
    return name.removeprefix(_PREFIX).replace(_BASE, ".")


def targets_of(model: nn.Module) -> dict[str, Target]:
    """Modules under LoRA by Hugging Face name; empty for a model without peft.

    Raises ValueError naming the module for what cannot be sent exactly: an adapter that is merged already (it would be applied twice),
    several active adapters, DoRA, and layers other than plain linear ones.
    """
    found = {}
    for path, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        layer: Any = module
        name, active = served_name(path), list(layer.active_adapters)
        if layer.merged:
            raise ValueError(f"module {name}: its adapter is merged into the weight, which would be sent and then be added to once more; call unmerge_adapter first")
        if len(active) != 1 or active[0] not in layer.lora_A:
            raise ValueError(f"module {name} has active adapters {active}; exactly one can be sent")
        if not isinstance(layer.base_layer, nn.Linear) or getattr(layer, "fan_in_fan_out", False) or layer.use_dora.get(active[0], False) or layer.lora_bias.get(active[0], False):
            raise ValueError(f"module {name} is a {type(layer.base_layer).__name__} or uses DoRA or a LoRA bias; only LoRA on linear layers can be sent")
        found[name] = Target(module=name, a=layer.lora_A[active[0]].weight, b=layer.lora_B[active[0]].weight, scaling=float(layer.scaling[active[0]]))
    return found


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters by Hugging Face name, without adapters."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            yield served_name(name), parameter


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """All of a small parameter. Collective where it is sharded."""
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
