"""The training loop of one rank: take, train, publish, perhaps save."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from learner.config import LearnerConfig
from learner.trainer.checkpoint import Saver
from learner.trainer.clock import Clock
from learner.trainer.companion import Companion
from learner.trainer.critic import Critic
from learner.trainer.decode import Batch
from learner.trainer.feed import Feed, Order
from learner.trainer.metrics import mismatch_of
from learner.trainer.model import Policy
from learner.trainer.objective import Objective
from learner.trainer.optimizer import Optimizer
from learner.trainer.publish import Published, Publisher
from learner.trainer.record import Recorder
from learner.trainer.tally import StepResult
from learner.trainer.update import Course, train_step
from protos import faultpoints


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the loop works with, made in __main__ (or by a test)."""

    config: LearnerConfig
    feed: Feed
    objective: Objective
    policy: Policy
    companions: Mapping[Literal["reference", "teacher"], Companion]  # second models, empty for most algorithms
    optimizer: Optimizer
    critic: Critic | None  # of PPO; None for every other algorithm
    publisher: Publisher
    saver: Saver
    recorder: Recorder  # writes on rank 0 only
    clock: Clock
    stop: threading.Event  # set by a signal: end after the running step


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How the loop ended. Example: End(published=Published(...), finished=True)"""

    published: Published  # the last one
    finished: bool  # the run is over; False: told to stop, to be continued from the cut


def run(parts: Parts, step: int) -> End:
    """Trains from policy step `step` until there is no batch any more or a rank was told to stop. Collective."""
    config, clock, leaving = parts.config, parts.clock, False
    published = parts.publisher.publish(step, will_save=False)
    while not leaving:
        batch = next_batch(parts, step)
        if not isinstance(batch, Batch):
            return End(published=published, finished=batch is None)
        faultpoints.point("trainer_batch")
        with clock.time("train"):
            minibatches = parts.objective.minibatches(batch.table, num=config.optimizer.minibatches)
            result = train_step(
                parts.policy, parts.optimizer, batch.samples, minibatches, objective=parts.objective, row_tokens=config.trainer.row_tokens, share_prefix=config.trainer.share_prefix,
                companions=parts.companions, critic=parts.critic, course=course_of(config, step),
            )  # fmt: skip
        faultpoints.point("trainer_update")
        step, leaving = step + 1, any_rank(parts.stop.is_set())
        parts.saver.settle()  # a step without signal has made no update, which would have waited
        parts.objective.control.follow(result.sums)
        for companion in parts.companions.values():
            companion.follow(parts.policy, step)
        will_save = leaving or save_is_due(step, every_steps=config.checkpoint.every_steps, last_step=config.steps)
        with clock.time("snapshot"):
            published = parts.publisher.publish(step, will_save=will_save, mismatch=measured(parts, result))
        if will_save:
            with clock.time("save"):
                parts.saver.start(step)
        parts.recorder.step(batch, result, published, parts.saver.report, parts.publisher.pusher.metrics(), clock.take(), kl_factor=parts.objective.control.factor if parts.objective.control.state() else None)
    return End(published=published, finished=False)


def next_batch(parts: Parts, step: int) -> Batch | Order | None:
    """The batch of a step, cuts made in between where the gateway wants one first; an order to leave; None: the run is over."""
    while True:
        with parts.clock.time("wait"):
            batch = parts.feed.take_batch(step, stop=parts.stop)
        if not isinstance(batch, Order):
            parts.clock.begin()
            return batch
        if batch.save:
            with parts.clock.time("save"):
                parts.saver.start(step)
                parts.saver.wait()
                dist.barrier()  # the gateway forgets the order when rank 0 has reported; nobody asks again before
        if batch.leave:
            return batch


def measured(parts: Parts, result: StepResult) -> float | None:
    """The mismatch that the staleness bound follows; None where the bound is fixed or nothing was computed."""
    adaptive, (low, high) = parts.config.staleness.adaptive, parts.objective.config.ratio_bounds
    return None if adaptive is None else mismatch_of(result, adaptive.metric, clip_low=low, clip_high=high)


def course_of(config: LearnerConfig, step: int) -> Course:
    """Of the step that starts from policy step `step`: in the first ones the critic may be trained alone."""
    critic = config.critic_in_use
    return Course(epochs=config.optimizer.epochs, actor=critic is None or step >= critic.warmup_steps)


def save_is_due(step: int, *, every_steps: int | None, last_step: int) -> bool:
    """Whether a cut of this policy step is saved: every `every_steps` steps (None: never in between) and at the last step."""
    return step == last_step or (every_steps is not None and step % every_steps == 0)


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; the same answer on all. Collective."""
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor)
