"""What the updates of a step did, added up without waiting for the device, and over ranks at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from learner.trainer.optimizer import Update
from learner.trainer.packing import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the updates of one policy step did, over all ranks.

    Example: StepResult(updates=(Update(grad_norm=1.2, lr=1e-6, skipped=False),), num_without_signal=0, loss=-0.01,
    sums={"clipped_high": 3.0}, log_ratio=tensor([...]))
    """

    updates: tuple[Update, ...]  # of the actor; empty while the critic warms up
    num_without_signal: int  # minibatches (of all epochs) without a token to train on: no update
    loss: float  # mean over the actor's updates
    sums: Mapping[str, float]  # token sums of the losses' metrics; `targets`, `neg_logprob` and `input_tokens` as well
    log_ratio: Tensor  # float32 [num_targets of the first minibatch with signal], in rank order: before any update of this step
    critic_updates: tuple[Update, ...] = ()


class Tally:
    """Example: `tally.add({"clipped_high": tensor(3)}); tally.updates.append(update); tally.result(num_minibatches=1)`"""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.critic_updates: list[Update] = []
        self._loss: list[Tensor] = []
        self._sums: dict[str, list[Tensor]] = {}
        self._log_ratio: list[Tensor] = []

    def add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(value)

    def add_row(self, loss: Tensor, sums: Mapping[str, Tensor], row: Row, logprob: Tensor) -> None:
        """Of one row of the actor."""
        self._loss.append(loss)
        self.add(sums)
        self.add({"targets": torch.tensor(row.num_targets), "neg_logprob": -logprob.sum(), "input_tokens": torch.tensor(row.ids.numel() if row.num_targets else 0)})
        if not self.updates:
            self._log_ratio.append((logprob - row.behaviour).float())

    def result(self, *, num_minibatches: int) -> StepResult:
        """Collective where an update was made; which all ranks know alike."""
        made = len(self.updates) or len(self.critic_updates)
        without = num_minibatches - made
        if not made:
            return StepResult(updates=(), num_without_signal=without, loss=0.0, sums={}, log_ratio=torch.zeros(0))
        names = sorted(self._sums)
        summed = torch.stack([_sum(values) for values in (self._loss, *(self._sums[name] for name in names))])
        loss, *sums = total(summed).tolist()
        log_ratio = concatenated(torch.cat(self._log_ratio).cpu() if self._log_ratio else torch.zeros(0))
        return StepResult(
            updates=tuple(self.updates), critic_updates=tuple(self.critic_updates), num_without_signal=without, loss=loss / max(1, len(self.updates)),
            sums=dict(zip(names, sums, strict=True)), log_ratio=log_ratio,
        )  # fmt: skip


def _sum(values: list[Tensor]) -> Tensor:
    """float64, on the CPU: those that lie on a device are added there and fetched as one."""
    here = [value for value in values if value.device.type == "cpu"]
    there = [value for value in values if value.device.type != "cpu"]
    parts = [torch.stack([value.to(torch.float64) for value in group]).sum().cpu() for group in (here, there) if group]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)


def total(local: Tensor) -> Tensor:
    """Element-wise sum over ranks of a float64 tensor on the CPU."""
    summed = local.clone()
    dist.all_reduce(summed)
    return summed


def concatenated(values: Tensor) -> Tensor:
    """A float32 vector of each rank, joined in rank order, on every rank."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([values.numel()]))
    padded = torch.zeros(max(int(length) for length in lengths))
    padded[: values.numel()] = values
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])
