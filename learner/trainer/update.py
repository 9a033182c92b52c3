"""One policy step: forward and backward over packed rows, one optimizer update a minibatch.

Every rank runs the same number of rows of each minibatch, agreed before the first one; a rank that has fewer runs dummy rows
that add exactly zero, so the sharded model's collectives always pair up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from learner.trainer.companion import Companion
from learner.trainer.model import Policy
from learner.trainer.objective import Objective
from learner.trainer.optimizer import Optimizer, Update
from learner.trainer.packing import Row, WeightedSample, dummy_row, pack
from learner.trainer.samples import Sample
from learner.trainer.selection import select_each
from learner.trainer.table import Counts, Minibatch, SampleId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What the updates of one policy step did, over all ranks.

    Example: StepResult(updates=(Update(grad_norm=1.2, lr=1e-6, skipped=False),), num_without_signal=0, loss=-0.01,
    sums={"clipped_high": 3.0}, log_ratio=tensor([...]), num_input_tokens=2048)
    """

    updates: tuple[Update, ...]
    num_without_signal: int  # minibatches without a token to train on: no update
    loss: float  # mean over minibatches
    sums: Mapping[str, float]  # token sums of the loss's metrics; `targets`, `neg_logprob` and `input_tokens` as well
    log_ratio: Tensor  # float32 [num_targets of the first minibatch with signal], in rank order: before any update of this step


def train_step(
    policy: Policy, optimizer: Optimizer, samples: Sequence[Sample], minibatches: Sequence[Minibatch], *, objective: Objective, row_tokens: int, share_prefix: bool,
    companions: Mapping[Literal["reference", "teacher"], Companion] = {},
) -> StepResult:  # fmt: skip
    """Trains on this rank's samples; collective. Samples that no minibatch gives an advantage are not computed: their gradient is 0.

    companions: second models, whose log-probs go into the row's field of the same name.
    """
    held = {(sample.group_id, sample.sample_index): sample for sample in samples}
    device = next(policy.parameters()).device
    packed = [_pack(minibatch, held, row_tokens, share_prefix) for minibatch in minibatches]
    num_rows = _largest([len(rows) for rows in packed])
    padded = [[row.to(device) for row in [*rows, *[dummy_row()] * (count - len(rows))]] for rows, count in zip(packed, num_rows, strict=True)]
    for name, companion in companions.items():
        judged = companion.logprobs(padded)
        padded = [[_with(row, name, value) for row, value in zip(part, values, strict=True)] for part, values in zip(padded, judged, strict=True)]
    padded = select_each(_with_start(policy, padded, objective), {name: one.config for name, one in (objective.sets or {"": objective}).items()}, _concatenated)
    tally = _Tally()
    updates: list[Update] = []
    for minibatch, rows in zip(minibatches, padded, strict=True):
        if not rows:
            continue
        for row in rows:
            tally.add(_backward(policy, row, minibatch.counts, objective), first=not updates)
        updates.append(optimizer.update())
    return tally.result(updates, num_minibatches=len(minibatches))


def _with(row: Row, name: Literal["reference", "teacher"], value: Tensor) -> Row:
    return replace(row, reference=value) if name == "reference" else replace(row, teacher=value)


def _with_start(policy: Policy, rows: Sequence[Sequence[Row]], objective: Objective) -> list[list[Row]]:
    """The rows with the policy's log-probs before the first update, where the objective needs them.

    The first minibatch has them from its own forward pass, so it is passed over unless a choice over the whole batch needs all. Collective.
    """
    if not objective.needs_start_logprobs:
        return [list(part) for part in rows]
    first = next((index for index, part in enumerate(rows) if part), 0)
    with torch.no_grad():
        return [list(part) if index == first and not objective.bounds_second_moment else [replace(row, start=policy(row)) for row in part] for index, part in enumerate(rows)]


def _pack(minibatch: Minibatch, held: Mapping[SampleId, Sample], row_tokens: int, share_prefix: bool) -> list[Row]:
    mine = [WeightedSample(sample=held[key], advantage=value, staleness=minibatch.staleness.get(key, 0)) for key, value in minibatch.advantages.items() if key in held]
    names = {key: minibatch.data_sets.get(key, "") for key in minibatch.advantages}
    of_sets = {name: [w for w in mine if names[w.sample.group_id, w.sample.sample_index] == name] for name in dict.fromkeys(names.values())}
    return [replace(row, data_set=name) for name, weighted in of_sets.items() for row in pack(weighted, row_tokens=row_tokens, share_prefix=share_prefix)]


def _largest(numbers: Sequence[int]) -> list[int]:
    """Element-wise maximum over ranks."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [int(value) for value in tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowResult:
    loss: Tensor  # scalar, this row's share of the global loss
    sums: dict[str, Tensor]
    log_ratio: Tensor  # float32 [num_targets]


def _backward(policy: Policy, row: Row, counts: Counts, objective: Objective) -> _RowResult:
    """Forward and backward of one row; gradients add up in the parameters."""
    objective = objective.of(row.data_set)
    wants_entropy = objective.config.entropy_bonus > 0
    scores = policy(row, with_entropy=wants_entropy)
    logprob, entropy = scores.unbind() if wants_entropy else (scores, None)
    loss, sums = objective.row_loss(row, logprob, entropy, counts)
    loss.backward()
    detached = logprob.detach()
    sums |= {"targets": torch.tensor(row.num_targets), "neg_logprob": -detached.sum(), "input_tokens": torch.tensor(row.ids.numel() if row.num_targets else 0)}
    return _RowResult(loss=loss.detach(), sums=sums, log_ratio=(detached - row.behaviour).float())


class _Tally:
    """Adds rows up without waiting for the device, and over ranks at the end."""

    def __init__(self) -> None:
        self._loss: list[Tensor] = []
        self._sums: dict[str, list[Tensor]] = {}
        self._log_ratio: list[Tensor] = []

    def add(self, row: _RowResult, *, first: bool) -> None:
        self._loss.append(row.loss)
        for name, value in row.sums.items():
            self._sums.setdefault(name, []).append(value)
        if first:
            self._log_ratio.append(row.log_ratio)

    def result(self, updates: Sequence[Update], *, num_minibatches: int) -> StepResult:
        """Collective where an update was made; which all ranks know alike."""
        without = num_minibatches - len(updates)
        if not updates:
            return StepResult(updates=(), num_without_signal=without, loss=0.0, sums={}, log_ratio=torch.zeros(0))
        names = sorted(self._sums)
        local = [sum(float(value) for value in values) for values in (self._loss, *(self._sums[name] for name in names))]
        total = torch.tensor(local, dtype=torch.float64)
        dist.all_reduce(total)
        loss, *sums = total.tolist()
        log_ratio = _concatenated(torch.cat(self._log_ratio).cpu())
        return StepResult(updates=tuple(updates), num_without_signal=without, loss=loss / len(updates), sums=dict(zip(names, sums, strict=True)), log_ratio=log_ratio)


def _concatenated(values: Tensor) -> Tensor:
    """A float32 vector of each rank, joined in rank order, on every rank."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([values.numel()]))
    padded = torch.zeros(max(int(length) for length in lengths))
    padded[: values.numel()] = values
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])
