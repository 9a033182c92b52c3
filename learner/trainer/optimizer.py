"""Sharded master weights and their optimizer, with a schedule counted in updates and a skip that all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from learner.config import OptimizerConfig
from learner.trainer.adamw import AdamW, local
from learner.trainer.adamw8 import AdamW8, Packed
from learner.trainer.schedule import learning_rate

_NOT_MATRICES = ("embed", "wte", "wpe", "lm_head", "score", "head.")  # two-dimensional, but tables: Muon is for maps between hidden states


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one call of `update` did. Example: Update(grad_norm=9.6, lr=3e-6, skipped=False)"""

    grad_norm: float  # before clipping, over all ranks
    lr: float  # learning rate used; of a skipped update the one it would have used
    skipped: bool  # the norm was not finite: nothing changed


class Optimizer:
    """Optimizer, global-norm clip and schedule as one thing: gradients in, weights changed or the update skipped."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, *, total_updates: int | None = None) -> None:
        """Frozen parameters are left out. total_updates: of the whole run, the end of a decay that names none. Raises ValueError for a decay without an end, and for a kind whose package is missing."""
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._config, self._total_updates = config, total_updates
        self._matrices = {name: parameter for name, parameter in self.parameters.items() if config.kind == "muon" and _is_matrix(name, parameter)}
        self._muon = _muon(list(self._matrices.values()), config) if self._matrices else None
        kind = AdamW8 if config.kind == "adamw_8bit" else AdamW
        self._adamw: AdamW | AdamW8 = kind({name: parameter for name, parameter in self.parameters.items() if name not in self._matrices}, config)
        self.num_updates = 0  # updates made, the unit of the schedule
        self.num_skipped = 0
        self.before_update: Callable[[], None] = lambda: None  # called before anything changes
        learning_rate(config, num_updates=0, total_updates=total_updates)

    def update(self) -> Update:
        """Clips and steps, or skips when the global gradient norm is not finite; gradients are gone afterwards.

        Collective. The norm comes out of an all-reduce, so all ranks see the same number and decide alike; a skipped update
        advances neither moments nor schedule.
        """
        self.before_update()
        lr = learning_rate(self._config, num_updates=self.num_updates, total_updates=self._total_updates)
        norm = global_norm([parameter.grad for parameter in self.parameters.values() if parameter.grad is not None])
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if finite:
            divisor = norm / self._config.clip_norm if grad_norm > self._config.clip_norm else None
            self._adamw.step(lr=lr, divisor=None if divisor is None else divisor.float())
            if self._muon is not None:
                _step_muon(self._muon, self._matrices.values(), lr, divisor)
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.zero_grad()
        return Update(grad_norm=grad_norm, lr=lr, skipped=not finite)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """What the optimizer keeps of every parameter, as `<name>.exp_avg`, `.exp_avg_sq`, `.step` or `.momentum_buffer`; zeros before the first update. Without what is packed."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if self._muon is not None and name in self._matrices:
                tensors[f"{name}.momentum_buffer"] = self._muon.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.detach()))
            else:
                tensors.update({f"{name}.{key}": value for key, value in self._adamw.moments(name).items()})
        return tensors

    def packed(self) -> dict[str, Packed]:
        """The rest of `state`: moments kept in codes (kind adamw_8bit)."""
        return {f"{name}.{key}": value for name in self.parameters if isinstance(self._adamw, AdamW8) for key, value in self._adamw.packed(name).items()}


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients as one vector, a scalar on their device: local squares, one sum over the ranks that hold shards. Collective."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm([local(gradient) for gradient in gradients])
    total = torch.stack([norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in norms]).square().sum()
    sharded = next((gradient for gradient in gradients if isinstance(gradient, DTensor)), None)
    if sharded is not None and sharded.device_mesh.size() > 1:
        dist.all_reduce(total, group=sharded.device_mesh.get_group())
    return total.sqrt()


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not any(word in name for word in _NOT_MATRICES)


def _muon(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's own, its step scaled to AdamW's root mean square, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
    made: Any = torch.optim.Muon
    return made(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")  # type: ignore[no-any-return]


def _step_muon(muon: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], lr: float, divisor: Tensor | None) -> None:
    if divisor is not None:
        torch._foreach_div_([local(parameter.grad) for parameter in parameters if parameter.grad is not None], divisor)
    for group in muon.param_groups:
        group["lr"] = lr
    muon.step()
