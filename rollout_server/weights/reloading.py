"""Whether the engine's loader puts the same bytes back where they were.

A layer that stores its weights in another layout than the checkpoint's (experts above all) packs them after loading; where that cannot be
undone, an update writes checkpoint bytes over packed ones, and the engine draws nonsense without an error. So such a model's own tensors
are loaded once more at start, and every parameter must be what it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_EXPERTS = ("experts", "moe")


def packs_experts(model: torch.nn.Module) -> bool:
    """Whether a layer holds several experts in one."""
    return any(word in type(module).__name__.lower() for module in model.modules() for word in _EXPERTS)


def changed_by(reload: Callable[[], None], model: torch.nn.Module) -> str:
    """Name of the first parameter or buffer that a reload of the same tensors left with other values, or lost; "" where there is none.
    Then everything is put back as it was. Holds a copy of the model on the host meanwhile."""
    before = {name: (tensor, tensor.detach().to("cpu", copy=True)) for name, tensor in _tensors(model)}
    reload()
    after = dict(_tensors(model))
    changed = next((name for name, (_, copy) in before.items() if name not in after or not _same(after[name], copy)), "")
    if changed:
        with torch.no_grad():
            for name, (tensor, copy) in before.items():
                tensor.data.copy_(copy)
                if name in after and after[name].shape == copy.shape:
                    after[name].data.copy_(copy)
    return changed


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """To the last bit."""
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    return torch.equal(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), copy.contiguous().view(-1).view(torch.uint8))
