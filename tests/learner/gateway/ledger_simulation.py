"""A random life of one ledger: actors that lease, wait, draw, lapse, die and come late; a trainer that closes steps, and crashes.

It judges by its own books, not the ledger's. A policy is what it was trained on: its history is the tuple of batches since the
start. The age of a token is the way from the policy that drew it to the one it trains, over the longest common beginning. So a
replay that gives the same batches makes the same policies, with no rule about rollbacks at all.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from learner.gateway.groups import Group, SampleFacts
from learner.gateway.groups import seq_of as _seq_of
from learner.gateway.ledger import Ledger, Plan
from learner.gateway.parts import Part, digest_of
from protos.arrays import pack_floats, pack_ids

GROUP_SIZE = 2


class Broken(AssertionError):
    """The ledger broke a promise."""


@dataclass(kw_only=True)
class Job:
    """A lease in an actor's hands: samples still to be drawn, versions and ids of the tokens of each, how many it thinks are kept, least version."""

    group: Group
    actor: int
    lease_id: str
    least: int
    left: dict[int, list[int]]
    slow: bool
    ids: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Simulation:
    """honest_actors: they wait for the least version before they draw. rollbacks: the trainer crashes now and then; abandons: and
    sometimes what was trained past the cut is not replayed. reports: actors report unfinished samples, and draw on what others reported."""

    ledger: Ledger
    seed: int
    honest_actors: bool = True
    rollbacks: bool = False
    abandons: bool = False
    drops: bool = True
    reports: bool = False
    num_continued: int = 0  # samples that were drawn on by another lease
    kept: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)  # own book: (id, version) of each token that was kept, by sample
    slow_share: float = 0.15
    now: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    late: list[tuple[str, int, SampleFacts]] = field(default_factory=list)
    loaded: list[int] = field(default_factory=lambda: [0, 0, 0])
    history: tuple[tuple[int, ...], ...] = ()
    history_of: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    plans: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)
    num_leases: int = 0
    cut: int = 0
    bounds: dict[int, int] = field(default_factory=dict)  # own book of the admitted staleness, by step
    bound_of: dict[int, int] = field(default_factory=dict)  # of each group, from its first lease on

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rule = self.ledger.limits.adaptive
        self.reporting = random.Random(self.seed)
        self.finishing = 0.15 if self.reports else 0.5  # share of draws that end a sample
        self.num_ids = 0
        self.mismatches = random.Random(self.seed)  # of their own, so that a fixed bound has the lives it always had

    @property
    def bound(self) -> int:
        return self.bounds[max(self.bounds)] if self.bounds else self.ledger.limits.max_staleness

    def run(self, num_events: int) -> None:
        """Random events, then a fair end in which the run must still make progress. Raises Broken."""
        self.publish()
        events = [self.lease, self.lease, self.lease, *[self.draw] * 8, self.load, self.load, *[self.train] * 4, self.lapse, self.die, self.arrive_late, self.hurry]
        for _ in range(num_events):
            self.now += 1
            self.random.choice(events)()
            if self.reports:
                self.report()
            if self.rollbacks and self.random.random() < 0.01:
                self.crash()
            self.check()
        self.progress()

    # What actors do

    def lease(self) -> None:
        again = self.ledger.next_release()
        if again is None and self.ledger.room() == 0:
            return
        self.num_leases += 1
        actor, lease_id = self.random.randrange(3), f"lease-{self.num_leases}"
        lapse_at = self.now + self.random.choice([30, 1000])
        if again is not None:
            group, record = self.ledger.lease_again(holder=str(actor), lease_id=lease_id, lapse_at=lapse_at)
        else:
            group, record = self.ledger.open_group(holder=str(actor), lease_id=lease_id, now=self.now, lapse_at=lapse_at, prompt_id="p", prompt_row=0)
            self.bound_of[group.seq] = self.bound
        self.records.append(record)
        published = self.ledger.published
        assert published is not None
        left: dict[int, list[int]] = {index: [] for index in range(group.num_drawn) if index not in group.samples}
        job = Job(group=group, actor=actor, lease_id=lease_id, least=published.number, left=left, slow=self.random.random() < self.slow_share)
        self.jobs.append(job)
        for index in left:
            known = self.kept.get((group.group_id, index), [])
            part = group.parts.get(index)
            if known != ([] if part is None else tokens_of(part)):
                raise Broken(f"sample ({group.group_id}, {index}) was reported as {known} and is lent as {part}")
            left[index] += [version for _, version in known]
            job.ids[index], job.kept[index] = [number for number, _ in known], len(known)
            self.num_continued += bool(known)

    def draw(self) -> None:
        ready = [job for job in self.jobs if not job.slow and (self.loaded[job.actor] >= job.least or not self.honest_actors)]
        if not ready:
            return
        job = self.random.choice(ready)
        if not self.loaded[job.actor]:
            return
        index = self.random.choice(list(job.left))
        job.left[index].append(self.loaded[job.actor])
        self.num_ids += 1
        job.ids[index].append(self.num_ids)
        if self.random.random() < self.finishing:
            self.finish(job, index)

    def report(self) -> None:
        """Of whoever draws, also one whose lease is another's by now."""
        if not self.jobs:
            return
        job = self.reporting.choice(self.jobs)
        index = self.reporting.choice(list(job.left))
        start, versions, ids = job.kept[index], job.left[index], job.ids[index]
        if start >= len(versions):
            return
        packed = pack_ids(ids[start:]).data
        part = Part(start=start, ids=packed, logprobs=pack_floats([0.0] * (len(ids) - start)).data, spans=tuple(sorted(Counter(versions).items())), finish="")
        name = job.group.group_id
        answer = self.ledger.report(name, index, lease_id=job.lease_id, part=part, digest_before=digest_of(pack_ids(ids[:start]).data))
        if answer.status == "elsewhere" and answer.num_tokens <= len(ids):
            job.kept[index] = answer.num_tokens
        if answer.status == "accepted":
            assert answer.record is not None
            self.records.append(answer.record)
            job.kept[index] = answer.num_tokens
            self.kept[name, index] = [*self.kept.get((name, index), []), *zip(ids[start:], versions[start:], strict=True)]
            if self.kept[name, index] != list(zip(ids, versions, strict=True)):
                raise Broken(f"sample ({name}, {index}) is kept as tokens that nobody drew one after another")

    def finish(self, job: Job, index: int) -> None:
        versions = job.left.pop(index)
        if not job.left:
            self.jobs.remove(job)
        spans = tuple(sorted(Counter(versions).items()))
        bad = self.drops and self.random.random() < 0.05
        reward = None if bad else self.random.random()
        facts = SampleFacts(
            reward=reward,
            unusable_reason="unscored_timeout" if bad else "",
            num_prompt_tokens=1,
            num_completion_tokens=len(versions),
            num_trained_tokens=len(versions),
            spans=spans,
        )
        sent = (job.group.group_id, index, facts)
        if self.random.random() < 0.1:
            self.late.append(sent)
        else:
            self.submit(*sent)
            if self.random.random() < 0.1:
                self.late.append(sent)

    def submit(self, group_id: str, index: int, facts: SampleFacts) -> None:
        answer = self.ledger.submit(group_id, index, facts)
        if answer.record is not None:
            self.records.append(answer.record)

    def arrive_late(self) -> None:
        if self.late:
            self.submit(*self.late.pop(self.random.randrange(len(self.late))))

    def hurry(self) -> None:
        for job in self.jobs:
            job.slow = job.slow and self.random.random() < 0.9

    def load(self) -> None:
        published = self.ledger.published
        if published is not None:
            self.loaded[self.random.randrange(3)] = published.number

    def lapse(self) -> None:
        self.made(self.ledger.expire(self.now))

    def die(self) -> None:
        if self.random.random() < 0.1:
            actor = self.random.randrange(3)
            self.made(self.ledger.release_holder(str(actor), in_good_order=self.random.random() < 0.5))
            if self.random.random() < 0.7:  # otherwise only its stream was lost, and it goes on drawing
                self.jobs = [job for job in self.jobs if job.actor != actor]

    # What the trainer does

    def train(self) -> None:
        ledger = self.ledger
        if ledger.published is None:
            self.publish()
            return
        active = ledger.account.active
        if active is not None:
            self.publish()
            return
        plan, record = ledger.form(ledger.step)
        self.made(record)
        if plan is not None:
            self.judge(plan)

    def publish(self) -> None:
        active = self.ledger.account.active
        if active is not None:
            self.history = (*self.history, active.groups)
        mismatch = self.mismatches.choice([0.01, 0.01, 0.07, 0.2, math.nan, None]) if active is not None else None
        version, record = self.ledger.publish(self.ledger.step + (active is not None), mismatch=mismatch)
        self.made(record)
        self.move(version.step, mismatch)
        self.history_of[version.number] = self.history
        if self.random.random() < 0.2:
            self.cut = version.step
            self.made(self.ledger.cover(self.cut))

    def move(self, step: int, mismatch: float | None) -> None:
        """One more under .05, one less over .1 or for no number, never beyond the limits."""
        rule = self.rule
        if rule is None:
            return
        change = 0 if mismatch is None else 1 if mismatch < 0.05 else -1 if math.isnan(mismatch) or mismatch > 0.1 else 0
        self.bounds[step] = sorted((rule.lowest, self.bound + change, rule.highest))[1]

    def crash(self) -> None:
        """Back to the newest cut; the same plans must come again, unless they are abandoned."""
        replay = not self.abandons or self.random.random() < 0.5
        self.made(self.ledger.rollback(self.cut, replay=replay))
        self.history = self.history[: self.cut]
        self.bounds = {step: bound for step, bound in self.bounds.items() if step <= self.cut}
        if not replay:
            self.plans = {step: groups for step, groups in self.plans.items() if step < self.cut}

    def made(self, record: dict[str, Any] | None) -> None:
        if record is not None:
            self.records.append(record)

    # Judgement

    def judge(self, plan: Plan) -> None:
        if self.plans.setdefault(plan.step, plan.groups) != plan.groups:
            raise Broken(f"step {plan.step} was planned as {self.plans[plan.step]} and again as {plan.groups}")
        num_tokens = 0
        for row in self.ledger.table(plan):
            greedy = bool(self.ledger.limits.baselines) and row.sample_index == GROUP_SIZE
            if greedy and row.facts.reward is None:
                raise Broken(f"group {row.group_id} has no baseline in the batch of step {plan.step}")
            for version, count in row.facts.spans if row.facts.usable and not greedy else ():
                age = way(self.history_of[version], self.history)
                self.ages[age] += 1
                num_tokens += count
                if age > self.bound_of.get(seq_of(row.group_id), self.ledger.limits.max_staleness):
                    raise Broken(f"staleness {age} at step {plan.step}, group {row.group_id}")
        if num_tokens != sum(count for _, count in plan.tokens):
            raise Broken(f"tokens of step {plan.step} by age: {plan.tokens} planned, {num_tokens} to train on")

    def check(self) -> None:
        counts = self.ledger.counts()
        if counts.leased != counts.trained + sum(counts.dropped.values()) + counts.open:
            raise Broken(f"conservation: {counts}")
        trained = [seq for groups in self.history for seq in groups]
        if len(trained) != len(set(trained)) or len(trained) != counts.trained:
            raise Broken(f"trained twice or miscounted: {sorted(trained)}, {counts.trained}")

    def progress(self) -> None:
        """A fair end: everyone does their work, so three more steps must come. Raises Broken when they do not."""
        self.finishing = 0.5
        goal = max(self.ledger.step, *self.plans, 0) + 3
        for _ in range(400):
            if self.ledger.step >= goal:
                return
            self.now += 1000
            for job in self.jobs:
                job.slow = False
            for event in (self.lapse, self.lease, self.lease, self.load, self.load, self.load, self.load, *[self.draw] * 12, *[self.arrive_late] * 3, self.train):
                event()
                self.check()
        raise Broken(f"deadlock at step {self.ledger.step}: {self.ledger.counts()}, open {sorted(self.ledger.account.outside())}")


def tokens_of(part: Part) -> list[tuple[int, int]]:
    """(id, version) of each token."""
    versions = [version for version, count in part.spans for _ in range(count)]
    return list(zip((int.from_bytes(part.ids[at : at + 4], "little") for at in range(0, len(part.ids), 4)), versions, strict=True))


def seq_of(group_id: str) -> int:
    seq = _seq_of(group_id)
    assert seq is not None
    return seq


def way(old: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]) -> int:
    """Steps from one policy down to the last one that both histories share, and up to the other."""
    shared = next((step for step, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return len(old) - shared + len(new) - shared
