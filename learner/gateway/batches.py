"""Decides the batch of each policy step, once for all ranks: a plan that is on the disk, the end of the run, or why it cannot go on.

    _decide   consumes the account and the clock, produces one decision a step, waits for the bell, is unblocked by submissions,
              drops, a publication, or (max_minutes) the clock
    take      consumes decisions, waits for the one of its step
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc

from learner.gateway.account import Plan
from learner.gateway.assign import group_cost, owners
from learner.gateway.attendance import Attendance
from learner.gateway.books import Books
from learner.gateway.catalog import Shelf
from learner.gateway.meter import NO_STATS, Meter, Stats
from learner.gateway.refusals import Refused, precondition
from learner.gateway.saving import Saving
from learner.gateway.terms import Row
from learner.gateway.versions import StalenessBroken
from protos import faultpoints

logger = logging.getLogger("headrace.learner.batches")
CLOCK_S = 0.5  # how often a waiting decision looks at the clock
LAST_TRIES = 3  # of the cut that a run ends with


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The batch of one step. table: every sample with its owner rank; empty with end_of_run, save_first and leave (see feed.proto)."""

    policy_step: int
    end_of_run: bool
    table: tuple[tuple[Row, int], ...]
    stats: Stats
    save_first: bool = False
    leave: bool = False

    def rows_of(self, rank: int) -> list[tuple[str, int]]:
        """(group_id, sample_index) of the samples to train on that a rank gets, in table order."""
        return [(row.group_id, row.sample_index) for row, owner in self.table if owner == rank and row.trains]


class Batches:
    """num_steps: policy steps of the whole run. `is_over()`: whether the time is up or the run was finished.

    `may_end(policy_step)`: whether nothing keeps the run from ending at its last step, as an evaluation does.
    alone_s: how long a batch is waited for with no replica; None: for ever. ask_cut: set by the feed; journals that a cut of the newest step is wanted.
    """

    def __init__(
        self, books: Books, attendance: Attendance, shelf: Shelf, saving: Saving,
        *, num_steps: int, seed: int, shuffle_rewards: bool, is_over: Callable[[], bool], alone_s: float | None = None,
        may_end: Callable[[int], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        self._books = books
        self._attendance = attendance
        self._shelf = shelf
        self._num_steps = num_steps
        self._seed = seed
        self._shuffle_rewards = shuffle_rewards
        self._is_over = is_over
        self._may_end = may_end
        self._alone_s = alone_s
        self._saving = saving
        self.ask_cut: Callable[[], Awaitable[None]] | None = None
        self._meter = Meter()
        self._decisions: dict[int, asyncio.Task[Decision]] = {}
        self._leaving: set[int] = set()
        self._waited_s, self._waiting_since_s = 0.0, math.inf
        self._last_tries = 0

    async def take(self, policy_step: int, *, num_ranks: int, leaving: bool = False) -> Decision:
        """The decision of a step that is due, or becomes due with the next publication. Raises Refused FAILED_PRECONDITION or ABORTED."""
        due = self._books.ledger.step
        if not due <= policy_step <= due + 1:
            raise precondition(f"the batch of step {policy_step} was asked for, step {due} is due; register again to learn where the run is")
        if leaving:
            self._leaving.add(policy_step)
            self._books.bell.ring()
        if policy_step not in self._decisions:
            self._decisions[policy_step] = asyncio.create_task(self._decide(policy_step, num_ranks))
        self._waiting_since_s = min(self._waiting_since_s, time.monotonic())
        try:
            return await asyncio.shield(self._decisions[policy_step])
        finally:
            if all(decision.done() for decision in self._decisions.values()):
                self._waited_s, self._waiting_since_s = self.waited_s, math.inf

    @property
    def waited_s(self) -> float:
        """Time in which the trainer waited for a batch to be decided, since the start, a wait that goes on included."""
        return self._waited_s + max(0.0, time.monotonic() - self._waiting_since_s)

    def forget(self, before: int | None = None) -> None:
        """Closed steps, or (None) all of a trainer that is not on duty any more: whoever waits for those is cancelled."""
        for step in [step for step in self._decisions if before is None or step < before]:
            self._decisions.pop(step).cancel()
        self._leaving = {step for step in self._leaving if before is not None and step >= before}
        if before is None:
            self._last_tries = 0  # a new trainer comes after whoever made room

    def saved(self, policy_step: int) -> None:
        """A save of this step has ended, well or not: who was told to save first may ask again."""
        decision = self._decisions.get(policy_step)
        if decision is not None and decision.done() and not decision.cancelled() and not decision.exception() and decision.result().save_first:
            del self._decisions[policy_step]

    async def _decide(self, policy_step: int, num_ranks: int) -> Decision:
        loop = asyncio.get_running_loop()
        asked_s, ledger = loop.time(), self._books.ledger
        while True:
            if ledger.published is not None and ledger.step == policy_step:
                if ledger.exhausted:
                    raise Refused(grpc.StatusCode.ABORTED, ledger.exhausted + _words(self._books.unusable))
                if self._books.unscored.words:
                    raise Refused(grpc.StatusCode.ABORTED, self._books.unscored.words)
                if self._is_end(policy_step):
                    over = self._may_end(policy_step)
                    if (end := await self._end(policy_step, num_ranks, loop.time() - asked_s)) is not None and (over or end.save_first):
                        return end
                    if policy_step in self._leaving and (order := await self._order(policy_step, num_ranks, 0.0)) is not None:
                        return order
                elif (order := await self._order(policy_step, num_ranks, loop.time() - asked_s)) is not None:
                    return order
                elif not self._saving.alarm and (plan := await self._form(policy_step)) is not None:
                    faultpoints.point("after_plan_before_answer")
                    return self._decision(policy_step, plan, num_ranks, loop.time() - asked_s)
                elif (alone := self._alone()) and (cut := await self._end(policy_step, num_ranks, 0.0)) is not None:
                    if cut.save_first:
                        return cut
                    raise Refused(grpc.StatusCode.ABORTED, alone)
            await self._books.bell.wait(CLOCK_S)

    async def _end(self, policy_step: int, num_ranks: int, waited_s: float) -> Decision | None:
        """The end of the run, once its last policy has its cut; before that the order to make one. None: one is being made, or a failed
        one is tried again in a while. Raises Refused ABORTED when that failed too often."""
        if self._saving.has_cut(policy_step):
            return self._decision(policy_step, None, num_ranks, waited_s)
        if not self._saving.was_asked(policy_step):
            if not self._saving.may_try():
                return None
            if self._last_tries == LAST_TRIES:
                raise Refused(grpc.StatusCode.ABORTED, self._saving.without_last_cut(policy_step, LAST_TRIES))
            self._last_tries += 1
            assert self.ask_cut is not None
            await self.ask_cut()
        return Decision(policy_step=policy_step, end_of_run=False, table=(), stats=NO_STATS, save_first=True)

    def _alone(self) -> str:
        """Why nothing will come any more; "" while something may. A slow replica is no absent one: it beats."""
        alone_s = self._attendance.alone_s
        if self._alone_s is None or alone_s < self._alone_s:
            return ""
        return (
            f"no rollout server has attended for {alone_s / 60:.1f} minutes, more than lease.alone_minutes={self._alone_s / 60:g}, and a batch is waited for: start one with this learner's address "
            "(its log says why it left), then the same command again, which goes on from the newest cut; or set alone_minutes to null to wait for ever"
        )

    async def _order(self, policy_step: int, num_ranks: int, waited_s: float) -> Decision | None:
        """What the ranks are to do instead of training: leave, or save a cut, or both. While a cut is wanted that cannot be tried yet,
        `saving.alarm` is set."""
        leave = policy_step in self._leaving
        full = await self._saving.wants_cut(policy_step)
        save = self._saving.was_asked(policy_step)
        if not save and not self._saving.is_covered(policy_step) and (leave or (full and self._saving.may_try())):
            assert self.ask_cut is not None
            await self.ask_cut()
            save = True
        if not (leave or save):
            return None
        return Decision(policy_step=policy_step, end_of_run=False, table=(), stats=NO_STATS, save_first=save, leave=leave)

    async def _form(self, policy_step: int) -> Plan | None:
        """A plan that is on the disk, if one can be made. Raises Refused ABORTED."""
        while True:
            try:
                faultpoints.point("before_plan")
                plan, record = self._books.ledger.form(policy_step, data_ended=self._data_ended())
            except StalenessBroken as error:
                logger.exception("the account broke its own bound")
                raise Refused(grpc.StatusCode.ABORTED, f"a defect of the account: {error}") from error
            if plan is None and record is None:
                return None
            await asyncio.shield(self._books.commit(record))
            if plan is not None:
                return plan

    def _is_end(self, policy_step: int) -> bool:
        """A plan that was made is trained, also again after a rollback: else a run whose time is up would end at an older policy than it had."""
        ledger = self._books.ledger
        planned = ledger.account.active is not None or policy_step in ledger.account.replays
        return policy_step >= self._num_steps or (not planned and (self._is_over() or (self._data_ended() and ledger.counts().open == 0)))

    def _data_ended(self) -> bool:
        """Whether no prompt is left for a new group. Raises Refused ABORTED when there are no prompts at all."""
        if self._shelf.failure is not None:
            raise Refused(grpc.StatusCode.ABORTED, str(self._shelf.failure))
        catalog = self._shelf.catalog
        ledger = self._books.ledger
        return catalog is not None and catalog.picker.next(ledger.account.history, ledger.step) is None

    def _decision(self, policy_step: int, plan: Plan | None, num_ranks: int, waited_s: float) -> Decision:
        ledger = self._books.ledger
        tokens = dict(plan.tokens) if plan else {}
        stats = self._meter.read(ledger, self._attendance.attending(), trainer_wait_s=waited_s, tokens_by_staleness=tokens)
        table = self._assign(ledger.table(plan), num_ranks) if plan else ()
        return Decision(policy_step=policy_step, end_of_run=plan is None, table=table, stats=stats)

    def _assign(self, rows: list[Row], num_ranks: int) -> tuple[tuple[Row, int], ...]:
        groups: dict[str, list[Row]] = {row.group_id: [] for row in rows}
        for row in rows:
            groups[row.group_id] += [row] if row.trains else []
        costs = [group_cost(max((row.facts.num_prompt_tokens for row in own), default=0), [row.facts.num_completion_tokens for row in own]) for own in groups.values()]
        owner = dict(zip(groups, owners(costs, num_ranks), strict=True))
        if self._shuffle_rewards:
            rows = [row for group in groups for row in shuffled([r for r in rows if r.group_id == group], self._seed)]
        return tuple((row, owner[row.group_id]) for row in rows)


def shuffled(rows: list[Row], seed: int) -> list[Row]:
    """One group with the rewards of its usable samples permuted: a control that must not learn. The same rows give the same permutation."""
    usable = [row for row in rows if row.facts.usable]
    rewards = [(row.facts.reward, row.facts.reward_parts) for row in usable]
    random.Random(f"shuffled_rewards:{seed}:{rows[0].group_id}").shuffle(rewards)
    given = iter(rewards)
    result = []
    for row in rows:
        if row.facts.usable:
            reward, parts = next(given)
            row = replace(row, facts=replace(row.facts, reward=reward, reward_parts=parts))
        result.append(row)
    return result


def _words(unusable: Counter[str]) -> str:
    """What is said of samples that could not be trained on; nothing where there were none."""
    if not unusable:
        return ""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in unusable.most_common())
    away = "; unscored_unavailable means that no reward server answered: see to the reward servers" if "unscored_unavailable" in unusable else ""
    return f" (unusable samples so far: {reasons}{away})"
