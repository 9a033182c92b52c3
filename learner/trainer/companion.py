"""A second model beside the policy: the reference that a KL term pulls towards, or the teacher of a distillation.

    before a step:  to the device ─▶ log-probs of every row, without gradient ─▶ back to the CPU where it is offloaded
    after a step:   the policy's weights are copied (periodic), mixed in (ema), or not (frozen, teacher)

It is sharded as the policy is, so following it needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from learner.trainer.model import Policy
from learner.trainer.packing import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Following:
    """How a companion follows the policy. Example: Following(decay=0.99) or Following(every_steps=50); neither: it stays as it is."""

    every_steps: int | None = None  # copied when the policy step is a multiple of it
    decay: float | None = None  # of each step: weight = decay * weight + (1 - decay) * policy's


class Companion:
    """Example: `Companion(load_policy(...), following=Following(), device=device, offload=True)`"""

    def __init__(self, policy: Policy, *, following: Following, device: torch.device, offload: bool) -> None:
        self._policy, self._following, self._device, self._offload = policy, following, device, offload
        for parameter in policy.parameters():
            parameter.requires_grad_(False)
        self._rest()

    def logprobs(self, rows: Sequence[Sequence[Row]]) -> list[list[Tensor]]:
        """Log-probs [num_targets] of each row of each minibatch. Collective: every rank must give the same number of rows."""
        if self._offload:
            self._policy.to(self._device)
        with torch.no_grad():
            values = [[self._policy(row) for row in part] for part in rows]
        self._rest()
        return values

    def follow(self, policy: Policy, policy_step: int) -> None:
        """After the step that made policy `policy_step`."""
        every, decay = self._following.every_steps, self._following.decay
        weight = 1.0 if every is not None and policy_step % every == 0 else 0.0 if decay is None else 1.0 - decay
        if weight == 0.0:
            return
        own = dict(self._policy.causal_lm.named_parameters())
        with torch.no_grad():
            for name, theirs in policy.causal_lm.named_parameters():
                mine = local(own[name])
                mine.lerp_(local(theirs).to(mine.device, mine.dtype), weight)

    def state(self) -> Mapping[str, Tensor]:
        """What a cut must hold of it: its weights where it follows the policy; nothing where its files give them again."""
        follows = self._following.every_steps is not None or self._following.decay is not None
        return {name: parameter.detach() for name, parameter in self._policy.causal_lm.named_parameters()} if follows else {}

    def check_same_vocabulary(self, policy: Policy, name: str) -> None:
        """Raises ValueError unless both models have as many tokens, padding rows aside; that they mean the same by them is the user's to know."""
        sizes = [each.num_drawable for each in (policy, self._policy)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"{name} has {sizes[1]} tokens, the policy {sizes[0]}: log-probs of tokens can only be compared over one vocabulary; use a model of the same family")

    def _rest(self) -> None:
        """Back to the shards: without a backward pass the root keeps its weights gathered, and those are neither followed nor saved."""
        if isinstance(self._policy, FSDPModule):
            self._policy.reshard()
        if self._offload:
            self._policy.to("cpu")


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
