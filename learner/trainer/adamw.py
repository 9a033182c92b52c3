"""AdamW on this rank's shards: the arithmetic is elementwise, so a shard needs nothing of the others, and no sharded operator is dispatched."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from learner.config import OptimizerConfig

KEYS = ("step", "exp_avg", "exp_avg_sq")


class AdamW:
    """torch's fused kernels. Example: `AdamW({"w": weight}, config).step(lr=1e-6, divisor=None)`"""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self._parameters, self._config = parameters, config
        self._moments: dict[str, dict[str, Tensor]] = {}

    def step(self, *, lr: float, divisor: Tensor | None) -> None:
        """Moves every parameter that has a gradient. divisor: a scalar on their device that gradients are divided by, in the same kernel; None: 1."""
        held = [(name, parameter) for name, parameter in self._parameters.items() if parameter.grad is not None]
        moments = [self.moments(name) for name, _ in held]
        gradients = [local(parameter.grad) for _, parameter in held if parameter.grad is not None]
        averages, squares = [local(each["exp_avg"]) for each in moments], [local(each["exp_avg_sq"]) for each in moments]
        adamw(
            [local(parameter) for _, parameter in held], gradients, averages, squares, [], [each["step"] for each in moments],
            fused=True, grad_scale=divisor, amsgrad=False, maximize=False, lr=lr, beta1=self._config.betas[0], beta2=self._config.betas[1], eps=self._config.eps, weight_decay=self._config.weight_decay,
        )  # fmt: skip

    def moments(self, name: str) -> dict[str, Tensor]:
        """Of one parameter, sharded as it is; zeros before its first update."""
        if name not in self._moments:
            parameter = self._parameters[name].detach()
            device = local(parameter).device
            self._moments[name] = {"step": torch.zeros((), dtype=torch.float32, device=device), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        return self._moments[name]


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory, without autograd. Fetched anew each time: FSDP may move a shard at the first forward pass."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
