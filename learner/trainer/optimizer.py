"""Sharded master weights and their optimizer, with a schedule counted in updates and a skip that all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from learner.config import OptimizerConfig
from learner.trainer.schedule import learning_rate

_ADAM_KEYS = ("step", "exp_avg", "exp_avg_sq")
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
        """Frozen parameters are left out. total_updates: of the whole run, the end of a decay that names none."""
        self.parameters = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
        self._config, self._total_updates = config, total_updates
        matrices = [name for name, parameter in self.parameters.items() if _is_matrix(name, parameter)] if config.kind == "muon" else []
        self._keys = {name: ("momentum_buffer",) if name in set(matrices) else _ADAM_KEYS for name in self.parameters}
        rest = [parameter for name, parameter in self.parameters.items() if name not in set(matrices)]
        self._optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimizers.append(_muon([self.parameters[name] for name in matrices], config))
        if rest:
            self._optimizers.append(torch.optim.AdamW(rest, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True))
        self.num_updates = 0  # updates made, the unit of the schedule
        self.num_skipped = 0
        self.before_update: Callable[[], None] = lambda: None  # called before anything changes
        learning_rate(config, num_updates=0, total_updates=total_updates)  # a schedule without an end fails here and not at its first update

    def update(self) -> Update:
        """Clips and steps, or skips when the global gradient norm is not finite; gradients are gone afterwards.

        Collective. The norm comes out of an all-reduce, so all ranks see the same number and decide alike; a skipped update
        advances neither moments nor schedule.
        """
        self.before_update()
        lr = learning_rate(self._config, num_updates=self.num_updates, total_updates=self._total_updates)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        grad_norm = float(_whole(norm))
        finite = bool(torch.isfinite(torch.tensor(grad_norm)))
        if finite:
            if grad_norm > self._config.clip_norm:
                clip_grads_with_norm_(self.parameters.values(), self._config.clip_norm, norm)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self.zero_grad()
        return Update(grad_norm=grad_norm, lr=lr, skipped=not finite)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """What the optimizer keeps of every parameter, as `<name>.exp_avg`, `.exp_avg_sq`, `.step` or `.momentum_buffer`; zeros before the first update."""
        tensors: dict[str, Tensor] = {}
        owners = {id(each): optimizer for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in self.parameters.items():
            held = owners[id(parameter)].state[parameter]
            if not held:
                held.update({key: torch.zeros((), dtype=torch.float32, device=parameter.device) if key == "step" else torch.zeros_like(parameter) for key in self._keys[name]})
            tensors.update({f"{name}.{key}": held[key] for key in self._keys[name]})
        return tensors


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.dim() == 2 and not any(word in name for word in _NOT_MATRICES)


def _muon(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's own, its step scaled to AdamW's root mean square, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
    made: Any = torch.optim.Muon
    return made(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")  # type: ignore[no-any-return]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
