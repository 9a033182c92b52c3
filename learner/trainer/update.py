"""One policy step: forward and backward over packed rows, one optimizer update a minibatch and epoch.

    rows ─▶ reference, teacher ─▶ critic: values, advantages ─▶ log-probs at the start ─▶ epochs × minibatches: actor, critic

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
from learner.trainer.critic import Critic
from learner.trainer.model import Policy
from learner.trainer.objective import Objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.packing import Plan, Row, WeightedSample, dummy_row
from learner.trainer.samples import Sample
from learner.trainer.selection import select_each
from learner.trainer.table import Counts, Minibatch, SampleId
from learner.trainer.tally import StepResult, Tally, concatenated, total
from learner.trainer.values import with_advantages_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How often a step goes over its batch, and who is trained. Example: Course(epochs=2, actor=True)"""

    epochs: int = 1
    actor: bool = True  # False while the critic warms up: the policy stands still


def train_step(
    policy: Policy, optimizer: Optimizer, samples: Sequence[Sample], minibatches: Sequence[Minibatch], *, objective: Objective, row_tokens: int, share_prefix: bool,
    companions: Mapping[Literal["reference", "teacher"], Companion] = {}, critic: Critic | None = None, course: Course = Course(),
) -> StepResult:  # fmt: skip
    """Trains on this rank's samples; collective. Samples that no minibatch gives an advantage are not computed: their gradient is 0.

    companions: second models, whose log-probs go into the row's field of the same name. critic: of an algorithm that has one.
    """
    rows = _rows(policy, samples, minibatches, row_tokens, share_prefix)
    configs = {name: one.config for name, one in (objective.sets or {"": objective}).items()}
    for name, companion in companions.items():
        judged = companion.logprobs(rows)
        rows = [[_with(row, name, value) for row, value in zip(part, values, strict=True)] for part, values in zip(rows, judged, strict=True)]
    if critic is not None:
        rows = with_advantages_each(rows, critic.values(rows), configs, total)
    if course.actor:
        rows = select_each(_with_start(policy, rows, objective), configs, concatenated)
    tally = Tally()
    for _ in range(course.epochs):
        for number, (minibatch, part) in enumerate(zip(minibatches, rows, strict=True)):
            if not part:
                continue
            if course.actor:
                rows[number] = _train_actor(policy, optimizer, part, minibatch.counts, objective, tally)
            if critic is not None:
                _train_critic(critic, part, minibatch.counts, tally)
    return tally.result(num_minibatches=len(minibatches) * course.epochs)


def _train_actor(policy: Policy, optimizer: Optimizer, rows: Sequence[Row], counts: Counts, objective: Objective, tally: Tally) -> list[Row]:
    """One update; the rows with the log-probs they had before it as their start, where the objective will ask again."""
    made = []
    for row in rows:
        logprob = _backward(policy, row, counts, objective, tally)
        made.append(replace(row, start=logprob) if objective.needs_start_logprobs and row.start is None else row)
    tally.updates.append(optimizer.update())
    return made


def _train_critic(critic: Critic, rows: Sequence[Row], counts: Counts, tally: Tally) -> None:
    for row in rows:
        tally.add(critic.backward(row, counts))
    tally.critic_updates.append(critic.update())


def _rows(policy: Policy, samples: Sequence[Sample], minibatches: Sequence[Minibatch], row_tokens: int, share_prefix: bool) -> list[list[Row]]:
    """Rows of each minibatch on the policy's device, as many as on every other rank. Collective."""
    held: dict[SampleId, list[Sample]] = {}
    for sample in samples:
        held.setdefault((sample.group_id, sample.sample_index), []).append(sample)
    device = policy.device
    plans = [(number, name, Plan(mine, row_tokens=row_tokens, share_prefix=share_prefix)) for number, minibatch in enumerate(minibatches) for name, mine in _mine(minibatch, held).items()]
    made: list[list[Row]] = [[] for _ in minibatches]
    for (number, name, plan), count in zip(plans, _largest([plan.num_rows for _, _, plan in plans]), strict=True):
        rows = plan.rows(num_rows=count, pairs_per_token=policy.pairs_per_token)
        made[number] += [replace(row, data_set=name).to(device) for row in [*rows, *[dummy_row()] * (count - len(rows))]]
    return made


def _mine(minibatch: Minibatch, held: Mapping[SampleId, Sequence[Sample]]) -> dict[str, list[WeightedSample]]:
    """This rank's samples by data set, the strands of one together; the same data sets on every rank."""
    names = {key: minibatch.data_sets.get(key, "") for key in minibatch.advantages}
    mine: dict[str, list[WeightedSample]] = {name: [] for name in names.values()}
    for key, value in minibatch.advantages.items():
        mine[names[key]] += [WeightedSample(sample=strand, advantage=value, staleness=minibatch.staleness.get(key, 0)) for strand in held.get(key, ())]
    return mine


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


def _largest(numbers: Sequence[int]) -> list[int]:
    """Element-wise maximum over ranks."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [int(value) for value in tensor]


def _backward(policy: Policy, row: Row, counts: Counts, objective: Objective, tally: Tally) -> Tensor:
    """Forward and backward of one row; gradients add up in the parameters. The log-probs [num_targets], detached."""
    objective = objective.of(row.data_set)
    wants_entropy = objective.config.entropy_bonus > 0
    scores = policy(row, with_entropy=wants_entropy)
    logprob, entropy = scores.unbind() if wants_entropy else (scores, None)
    loss, sums = objective.row_loss(row, logprob, entropy, counts)
    loss.backward()
    detached: Tensor = logprob.detach()
    tally.add_row(loss.detach(), sums, row, detached)
    return detached
