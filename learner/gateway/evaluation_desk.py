"""Evaluations beside training: begins them, lends their prompts, takes their answers, ends them in time.

    published  consumes a publication, notes what is due,                     unblocks `watch`
    next       consumes free prompts, produces loans,                         called by the lease desk, before training's own
    take       consumes answers, produces receipts, waits for the prompts,    unblocks `watch` with the last one
    watch      consumes the clock and what is due, begins and ends evaluations, waits for its bell or half a second

Bounds: one evaluation at a time; its samples in flight hold at most `share` of the replicas' places while training goes on; it
ends after `deadline_s`, and so does the wait of a run's end for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from learner.evaluation_config import EvaluationConfig
from learner.gateway.attendance import Attendance
from learner.gateway.bell import Bell
from learner.gateway.books import Books
from learner.gateway.catalog import Catalog, Shelf
from learner.gateway.evaluation import Answer, Evaluation, group_name, parsed
from learner.gateway.evaluation_result import result_of, words
from learner.gateway.groups import SampleFacts
from learner.gateway.replicas import holder_of
from learner.gateway.trajectories import facts_of
from learner.lines import Lines
from protos.learner.v1alpha1 import learner_pb2
from protos.trajectory.v1alpha1 import trajectory_pb2

logger = logging.getLogger("headrace.learner.evaluation")
CLOCK_S = 0.5  # how often `watch` looks at the clock
LATE_S = 10.0  # after its deadline the end of a run does not even wait for this file's own work
KEPT_SAMPLES = 8  # answers of an evaluation that go to samples.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationLoan:
    """One prompt lent for its answers, as the lease message needs it. Example: prompt 3 of evaluation 0, its greedy answer is done."""

    group: int
    group_id: str
    lease_id: str
    attempt: int
    group_size: int
    greedy: tuple[int, ...]  # sample indexes
    done: tuple[int, ...]  # sample indexes
    least_version: int
    catalog: Catalog


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    lease_id: str
    holder: str
    lapse_s: float  # monotonic


class EvaluationDesk:
    """training_over: set by `may_end`; from then on evaluation has all places. on_end: awaited after each evaluation."""

    def __init__(
        self, config: EvaluationConfig, books: Books, attendance: Attendance, shelf: Shelf,
        *, vocabulary: int, lapse_s: float, max_attempts: int, metrics: Lines, samples: Lines, on_end: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._config, self._books, self._attendance, self._shelf = config, books, attendance, shelf
        self._vocabulary, self._lapse_s, self._max_attempts = vocabulary, lapse_s, max_attempts
        self._metrics, self._samples, self._on_end = metrics, samples, on_end
        self._evaluations = books.evaluations
        self._bell = Bell()
        self._due = False
        self.num_postponed = 0
        self._end_s: float | None = None  # monotonic; when a run that is otherwise over ends anyway
        self._deadline_s = time.monotonic() + config.deadline_s  # of the one that runs; a restarted gateway gives it the time again
        self._held: dict[int, _Held] = {}  # by group
        self._attempts: Counter[int] = Counter()
        self._free: deque[int] = deque(self._running.unfinished() if self._running else ())
        self._kept: list[dict[str, Any]] = []
        self._closed: int | None = None  # serial of the one whose result is made: nothing more goes into it
        attendance.lost.append(self._lost_replica)

    @property
    def _running(self) -> Evaluation | None:
        return self._evaluations.current

    # What others tell and ask

    def published(self) -> None:
        """A policy was published: perhaps it is to be evaluated; perhaps the account went back behind the one that is."""
        version, running = self._books.ledger.published, self._running
        assert version is not None
        self._end_s = None
        if running is not None and version.lineage != running.lineage and version.step < running.step:
            self._end(running, "rolled_back")
        if self._config.is_due(version.step) and version.step not in self._evaluations.seen:
            self._want()

    def may_end(self, policy_step: int) -> bool:
        """Asked again and again once training is over: whether no evaluation is to be waited for (any more)."""
        if self._end_s is None:
            self._end_s = time.monotonic() + self._config.deadline_s
            if self._config.at_end and policy_step not in self._evaluations.seen:
                self._want()
            self._books.bell.ring()  # there are more places now
        return (self._running is None and not self._due) or time.monotonic() > self._end_s + LATE_S

    def undecided(self) -> set[int]:
        """Policy steps whose score is still to come."""
        published = self._books.ledger.published
        due = {published.step} if self._due and published is not None else set()
        return due | ({self._running.step} if self._running else set())

    def status(self) -> learner_pb2.GetStatusResponse.Evaluation:
        running, counts, last = self._running, self._evaluations.counts(), self._evaluations.last
        return learner_pb2.GetStatusResponse.Evaluation(
            running=running is not None,
            policy_step=running.step if running else 0,
            version=running.version if running else 0,
            num_wanted=running.num_wanted if running else 0,
            num_leased=counts["leased"],
            num_scored=counts["scored"],
            num_unscored=counts["unscored"],
            num_lost=counts["lost"],
            num_open=counts["open"],
            num_postponed=self.num_postponed,
            last=words(last) if last else "",
            last_step=last["step"] if last else 0,
        )

    def num_leases(self, holder: str) -> int:
        return sum(held.holder == holder for held in self._held.values())

    # Lending

    def next(self, holder: str) -> EvaluationLoan | None:
        """Lends one prompt where the share allows it. Its record is queued for the disk."""
        running, catalog = self._running, self._shelf.catalog
        if running is None or catalog is None or not self._free or self._closed == running.serial or running.group_size > self._num_places() - self._num_in_flight(running):
            return None
        group = self._free.popleft()
        self._attempts[group] += 1
        self._held[group] = _Held(lease_id=uuid.uuid4().hex, holder=holder, lapse_s=time.monotonic() + self._lapse_s)
        if (record := self._evaluations.lend(group)) is not None:
            self._books.commit(record)
        return EvaluationLoan(
            group=group,
            group_id=group_name(running.serial, group),
            lease_id=self._held[group].lease_id,
            attempt=self._attempts[group],
            group_size=running.group_size,
            greedy=(running.num_samples,) if running.greedy else (),
            done=tuple(sorted(running.answers.get(group, ()))),
            least_version=running.version,
            catalog=catalog,
        )

    def give_back(self, lease_id: str) -> None:
        """A loan whose caller left before it got it."""
        for group in [group for group, held in self._held.items() if held.lease_id == lease_id]:
            self._attempts[group] -= 1
            self._release([group])

    def _num_places(self) -> int:
        """Samples that may be in flight: a share of the replicas' places, or all; always those of one prompt."""
        running = self._running
        assert running is not None
        if self._end_s is not None:
            return running.num_wanted
        places = sum(replica.num_running + replica.num_free for replica in self._attendance.attending() if replica.may_lease)
        return max(running.group_size, math.floor(self._config.share * places))

    def _num_in_flight(self, running: Evaluation) -> int:
        return sum(running.missing(group) for group in self._held)

    def _lost_replica(self, replica_id: str, incarnation: int) -> None:
        self._release([group for group, held in self._held.items() if held.holder == holder_of(replica_id, incarnation)])

    def _release(self, groups: list[int]) -> None:
        """Their leases have ended: lent again before new ones, or, after too many attempts, lost."""
        for group in groups:
            del self._held[group]
        lost = [group for group in groups if self._attempts[group] >= self._max_attempts]
        self._free.extendleft(sorted(set(groups) - set(lost), reverse=True))
        if lost:
            logger.warning("evaluation: %d prompts are given up after %d leases each", len(lost), self._max_attempts)
            self._books.commit(self._evaluations.lose(lost, "attempts"))
        if groups:
            self._bell.ring()
            self._books.bell.ring()

    # Answers

    async def until_prompts_are_known(self) -> None:
        """Raises the ValueError that loading them ended with."""
        await self._shelf.wait()

    def take(self, trajectory: trajectory_pb2.Trajectory) -> tuple[str, str]:
        """(status of the receipt, why with "unwanted"), once the prompts are known. Raises ValueError when the sample is malformed."""
        identity, running, catalog = parsed(trajectory.group_id), self._running, self._shelf.catalog
        wanted = identity is not None and running is not None and identity[0] == running.serial != self._closed and identity[1] < running.num_prompts and identity[1] not in running.lost
        if identity is None or running is None or catalog is None or not wanted:
            return "unwanted", f"{trajectory.group_id} is no prompt of an evaluation that runs"
        group, index = identity[1], trajectory.sample_index
        if index >= running.group_size:
            raise ValueError(f"sample_index={index} is outside the {running.group_size} samples of a prompt in this evaluation")
        if index in running.answers.get(group, ()):
            return "duplicate", ""
        facts = facts_of(trajectory, prompt_ids=catalog.ids[group], vocabulary=self._vocabulary, max_new_tokens=catalog.max_new_tokens[group])
        self._check_versions(trajectory.group_id, facts, running)
        self._books.commit(self._evaluations.answer(group, index, _answer(facts)))
        self._keep(trajectory, facts, running)
        if not running.missing(group):
            self._held.pop(group, None)
            self._bell.ring()
        return "accepted", ""

    def _check_versions(self, name: str, facts: SampleFacts, running: Evaluation) -> None:
        newest = self._books.ledger.account.versions.last_number
        for version, _ in facts.spans:
            if not running.version <= version <= newest:
                raise ValueError(f"{name}: a span names version {version}, but the lease asked for {running.version} or newer and the newest published is {newest}")

    def _keep(self, trajectory: trajectory_pb2.Trajectory, facts: SampleFacts, running: Evaluation) -> None:
        if len(self._kept) < KEPT_SAMPLES:
            versions = [version for version, _ in facts.spans]
            self._kept.append({"step": running.step, "group_id": trajectory.group_id, "sample_index": trajectory.sample_index, "text": trajectory.text, "reward": facts.reward, "versions": versions})

    # Beginning and ending

    async def watch(self) -> None:
        """For ever."""
        while True:
            now_s = time.monotonic()
            self._release([group for group, held in self._held.items() if held.lapse_s <= now_s])
            if (running := self._running) is not None and (reason := self._ended(running, now_s)) is not None:
                await self._finish(running, reason)
            elif running is None and self._due:
                self._begin()
            await self._bell.wait(CLOCK_S)

    def _want(self) -> None:
        if self._due or self._running is not None:
            self.num_postponed += 1
            logger.info("an evaluation is due while another runs: it waits, and is of the policy that is the newest then")
        self._due = True
        self._bell.ring()

    def _begin(self) -> None:
        """The newest policy's evaluation, once its prompts are there."""
        version, catalog = self._books.ledger.published, self._shelf.catalog
        if version is None or catalog is None:
            return
        self._due = False
        if version.step in self._evaluations.seen:
            return
        fingerprint, num_prompts, num_samples, greedy = self._asked(catalog)
        record = self._evaluations.begin(
            step=version.step, version=version.number, lineage=version.lineage, num_prompts=num_prompts, num_samples=num_samples, greedy=greedy, fingerprint=fingerprint
        )  # fmt: skip
        self._books.commit(record)
        self._deadline_s = time.monotonic() + self._config.deadline_s
        self._free = deque(range(len(catalog.ids)))
        logger.info("evaluation %d of step %d, version %d or newer, is asked: %d prompts", record["serial"], version.step, version.number, len(catalog.ids))

    def _ended(self, running: Evaluation, now_s: float) -> str | None:
        """Why it ends now; "" when all was answered; None: it goes on."""
        catalog = self._shelf.catalog
        if catalog is not None and self._asked(catalog) != (running.fingerprint, running.num_prompts, running.num_samples, running.greedy):
            return "other_prompts"
        if not self._free and not self._held:
            return "" if not running.lost else "attempts"
        deadline_s = self._deadline_s if self._end_s is None else min(self._deadline_s, self._end_s)
        return "deadline" if now_s > deadline_s else None

    def _asked(self, catalog: Catalog) -> tuple[str, int, int, bool]:
        return catalog.fingerprint, len(catalog.ids), self._config.samples, self._config.greedy

    async def _finish(self, running: Evaluation, reason: str) -> None:
        """Its line is written before its record: a gateway that dies in between writes it again, and the last line of a step counts."""
        if reason == "other_prompts":
            self._end(running, reason)
            return
        self._closed = running.serial
        result = result_of(running, k=self._config.k, threshold=self._config.threshold, reason=reason)
        line = {"step": running.step, "version": running.version, "lineage": running.lineage, "time_s": time.time(), "evaluation": result}
        await asyncio.to_thread(self._metrics.append, json.dumps(line, allow_nan=False) + "\n")
        await asyncio.to_thread(self._samples.append, "".join(json.dumps(kept) + "\n" for kept in self._kept))
        if self._running is not running:
            return  # the account was rolled back meanwhile
        logger.info("evaluation of step %d: %s", running.step, words(result))
        self._end(running, reason, result)
        await self._on_end()

    def _end(self, running: Evaluation, reason: str, result: dict[str, Any] | None = None) -> None:
        if result is None:
            logger.warning("the evaluation of step %d is given up: %s", running.step, reason)
        self._books.commit(self._evaluations.end(reason, result and {**result, "step": running.step}))
        self._held.clear()
        self._attempts.clear()
        self._free.clear()
        self._kept.clear()
        self._bell.ring()


def _answer(facts: SampleFacts) -> Answer:
    """A sample that may not be trained on has no score either: what makes it unusable makes its score doubtful."""
    score = facts.reward if facts.usable else None
    return Answer(
        score=score, unscored=facts.unusable_reason.removeprefix("unscored_"), num_tokens=facts.num_trained_tokens if facts.num_turns > 1 else facts.num_completion_tokens, truncated=facts.truncated, tokens_by_version=facts.spans
    )  # fmt: skip
