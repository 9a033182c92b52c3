"""AdamW over sharded master weights, with a warm-up counted in updates and a skip that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learner.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one call of `update` did. Example: Update(grad_norm=9.6, lr=3e-6, skipped=False)"""

    grad_norm: float  # before clipping, over all ranks
    lr: float  # learning rate used; of a skipped update the one it would have used
    skipped: bool  # the norm was not finite: nothing changed


def warmup_lr(lr: float, *, num_updates: int, warmup_updates: int) -> float:
    """Learning rate of the update that follows num_updates finished ones: lr * min(1, (num_updates + 1) / warmup_updates)."""
    return lr if num_updates + 1 >= warmup_updates else lr * (num_updates + 1) / warmup_updates


class Optimizer:
    """AdamW, global-norm clip and schedule as one thing: gradients in, weights changed or the update skipped."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.parameters = dict(named_parameters)
        self._config = config
        self.adamw = torch.optim.AdamW(
            list(self.parameters.values()), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self.num_updates = 0  # updates made, the unit of the schedule
        self.num_skipped = 0
        self.before_update: Callable[[], None] = lambda: None  # called before anything changes

    def update(self) -> Update:
        """Clips and steps, or skips when the global gradient norm is not finite; gradients are gone afterwards.

        Collective. The norm comes out of an all-reduce, so all ranks see the same number and decide alike; a skipped update
        advances neither moments nor schedule.
        """
        self.before_update()
        lr = warmup_lr(self._config.lr, num_updates=self.num_updates, warmup_updates=self._config.warmup_updates)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        grad_norm = float(_whole(norm))
        finite = bool(torch.isfinite(torch.tensor(grad_norm)))
        if finite:
            clip_grads_with_norm_(self.parameters.values(), self._config.clip_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.adamw.zero_grad(set_to_none=True)
        return Update(grad_norm=grad_norm, lr=lr, skipped=not finite)

    def state(self) -> dict[str, Tensor]:
        """Moments and step of every parameter as `<name>.exp_avg`, `.exp_avg_sq`, `.step`; zeros before the first update."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            held = self.adamw.state[parameter]
            if not held:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                held.update(step=step, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            tensors.update({f"{name}.{key}": held[key] for key in ("step", "exp_avg", "exp_avg_sq")})
        return tensors


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
