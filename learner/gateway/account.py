"""What the records mean: the state of the account, changed by `Account.apply` (and `add_sample`, a part of it) and by nothing else.

A record is one mutation, whole: a msgpack-able dict with its "type". The same records in the same order give the same state, so
a restarted gateway is the newest cut's `state()` plus the journal's records after it. Which records may be made is ledger.py's.

    data           rules, restart           what is kept of each data set; restart: the data are others, unfinished groups are dropped
    opened         seq, prompt_id, prompt_row, lease, now, version     a group's first lease; data_set, size, extra, baseline, bound and pick where they are not plain
    leased_again   seq, lease
    submitted      seq, sample_index, facts, dropped                   dropped: why its group, complete or decided before that, is not wanted, or ""; kept: why it might have been
    progressed     seq, sample_index, start, ids, logprobs, spans, finish     tokens drawn of a sample that is not submitted, from `start` on
    released       given_back, failed, dropped                         leases that ended unfulfilled: seqs; dropped: out of attempts
    dropped        groups, reason
    planned        step, groups, tokens, dropped                       dropped: seqs left behind by a rollback
    published      version, step, closed                               closed: the active plan was trained; bound: of groups opened from now on, where it changes
    rolled_back    step, replay
    covered        step
    continued      step, skip                                          the journal begins here, after the cut of step; skip: versions
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from learner.gateway.groups import Group, Lease, SampleFacts
from learner.gateway.history import History, Rules
from learner.gateway.parts import Part
from learner.gateway.versions import PolicyVersion, Versions

SCHEMA = 1
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The batch that is trained starting from policy `step`: sequence numbers in order of entry.

    tokens: staleness to number of trained tokens.
    """

    step: int
    groups: tuple[int, ...]
    tokens: tuple[tuple[int, int], ...]

    def to_state(self) -> list[Any]:
        return [self.step, list(self.groups), [list(pair) for pair in self.tokens]]

    @classmethod
    def from_state(cls, state: list[Any]) -> Plan:
        step, groups, tokens = state
        return cls(step=step, groups=tuple(groups), tokens=tuple((age, count) for age, count in tokens))


class Account:
    """Groups that may still matter, the plans they are in, and the totals.

    step: newest policy step; published: it has been, since the start or the last rollback.
    groups: by seq; open ones, and closed ones that no cut covers yet (their payloads may be replayed).
    unheld: incomplete, in nobody's hands. waiting: complete, in no batch. Both are seqs.
    active: the batch in training. closed, replays: by step.
    covered: plans of lower steps are forgotten. bounds: staleness admitted from a step on, by step; empty: the run's max_staleness.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.versions = Versions()
        self.step = self.lineage = self.covered = 0
        self.published = False
        self.next_seq = self.num_trained = self.drops_in_row = 0
        self.flat_in_step = self.num_kept_flat = 0  # groups without signal: dropped since the last plan, and kept in all
        self.dropped: dict[str, int] = {}
        self.tokens_by_staleness: dict[int, int] = {}
        self.bounds: dict[int, int] = {}
        self.history = History()
        self.groups: dict[int, Group] = {}
        self.unheld: set[int] = set()
        self.waiting: set[int] = set()
        self.active: Plan | None = None
        self.closed: dict[int, Plan] = {}
        self.replays: dict[int, Plan] = {}

    @property
    def bound(self) -> int | None:
        """Staleness that a group opened now is admitted under; None: the run's max_staleness."""
        return self.bounds[max(self.bounds)] if self.bounds else None

    @property
    def num_open(self) -> int:
        return len(self.groups) - sum(len(plan.groups) for plan in self.closed.values())

    def outside(self) -> Iterable[tuple[int, bool]]:
        """(seq, complete) of every open group that is in no batch, in no order."""
        return ((seq, seq in self.waiting) for seq, group in self.groups.items() if group.place == "open")

    def apply(self, record: Record) -> None:
        """Raises ValueError for a record of an unknown type."""
        handler = getattr(self, f"_apply_{record.get('type')}", None)
        if handler is None:
            raise ValueError(f"journal record of unknown type {record.get('type')!r}: it was written by another version of this program; use that one")
        handler(record)

    def _apply_data(self, record: Record) -> None:
        if record["restart"]:
            self._drop([seq for seq, group in self.groups.items() if group.place == "open" and seq not in self.waiting], "data_changed")
        self.history.set_rules({name: Rules.from_record(rules) for name, rules in record["rules"].items()}, restart=record["restart"])

    def _apply_opened(self, record: Record) -> None:
        seq = record["seq"]
        assert seq == self.next_seq, f"group {seq} opened, {self.next_seq} was due"
        self.groups[seq] = Group(
            seq=seq,
            prompt_id=record["prompt_id"],
            prompt_row=record["prompt_row"],
            opened_at=record["now"],
            first_version=record["version"],
            floor_step=self.step,
            attempts=1,
            lease=Lease(**record["lease"]),
            data_set=record.get("data_set", ""),
            size=record.get("size", self.group_size),
            baseline=record.get("baseline", False),
            bound=record.get("bound"),
            extra=record.get("extra", 0),
        )
        self.history.opened(self.groups[seq].data_set, record["prompt_row"], seq=seq, step=self.step, pick=record.get("pick", {}))
        self.next_seq += 1

    def _apply_leased_again(self, record: Record) -> None:
        group = self.groups[record["seq"]]
        group.lease = Lease(**record["lease"])
        group.attempts += 1
        self.unheld.discard(group.seq)

    def _apply_submitted(self, record: Record) -> None:
        self.add_sample(self.groups[record["seq"]], record["sample_index"], SampleFacts.from_record(record["facts"]), record["dropped"], kept=record.get("kept", ""))

    def add_sample(self, group: Group, sample_index: int, facts: SampleFacts, dropped: str, *, kept: str = "") -> None:
        """What a "submitted" record means, for whoever has its facts at hand: they need not be read back from the record just made."""
        group.samples[sample_index] = facts
        group.parts.pop(sample_index, None)
        if not group.complete and not dropped:
            return
        group.parts.clear()
        self.history.measured(group.data_set, group.prompt_row, (facts.reward for facts in group.usable() if facts.reward is not None))
        group.lease = None
        self.unheld.discard(group.seq)
        self.waiting.add(group.seq)
        if dropped:
            self._drop([group.seq], dropped)
        elif kept:
            self.num_kept_flat += 1  # says nothing of the prompts' worth, so the row of drops goes on
        else:
            self.drops_in_row = 0

    def _apply_progressed(self, record: Record) -> None:
        parts, index, part = self.groups[record["seq"]].parts, record["sample_index"], Part.from_record(record)
        parts[index] = parts[index].followed_by(part) if index in parts else part

    def _apply_released(self, record: Record) -> None:
        for seq in (*record["given_back"], *record["failed"]):
            self.groups[seq].lease = None
            self.unheld.add(seq)
        for seq in record["given_back"]:
            self.groups[seq].attempts -= 1
        self._drop(record["dropped"], "attempts")

    def _apply_dropped(self, record: Record) -> None:
        self._drop(record["groups"], record["reason"])

    def _apply_planned(self, record: Record) -> None:
        self._drop(record["dropped"], "rolled_back")
        self.active = Plan.from_state([record["step"], record["groups"], record["tokens"]])
        self.replays.pop(self.active.step, None)
        self.flat_in_step = 0
        for seq in self.active.groups:
            self.groups[seq].place = "planned"
            self.waiting.discard(seq)

    def _apply_published(self, record: Record) -> None:
        if record["closed"]:
            self._close()
        self.step = record["step"]
        self.published = True
        if "bound" in record:
            self.bounds[self.step] = record["bound"]
        self.versions.add(PolicyVersion(number=record["version"], lineage=self.lineage, step=self.step, branch=self.step))

    def _close(self) -> None:
        assert self.active is not None, "no batch is in training"
        for seq in self.active.groups:
            self.groups[seq].place = "closed"
        self._count_trained(self.active, 1)
        self.closed[self.active.step] = self.active
        self.active = None

    def _count_trained(self, plan: Plan, sign: int) -> None:
        self.num_trained += sign * len(plan.groups)
        for age, count in plan.tokens:
            self.tokens_by_staleness[age] = self.tokens_by_staleness.get(age, 0) + sign * count

    def _apply_rolled_back(self, record: Record) -> None:
        cut, replay = record["step"], record["replay"]
        reverted = [self.closed.pop(step) for step in sorted(self.closed) if step >= cut]
        for plan in reverted:
            self._count_trained(plan, -1)
        queue = [*reverted, *([self.active] if self.active else []), *self.replays.values()]
        self.active, self.replays = None, {plan.step: plan for plan in queue} if replay else {}
        for seq in (seq for plan in queue for seq in plan.groups):
            self.groups[seq].place = "planned" if replay else "open"
            if not replay:
                self.waiting.add(seq)
        for group in self.groups.values():
            group.rolled_back |= group.place == "open"
            if not replay:
                group.floor_step = min(group.floor_step, cut)
        if not replay:
            self.versions.leave(cut)
        self.step, self.published = cut, False
        self.bounds = {step: bound for step, bound in self.bounds.items() if step <= cut}  # what was measured past the cut is measured again
        self.lineage += 1

    def _apply_continued(self, record: Record) -> None:
        """From the cut alone: what came after it is unknown, so it is a rollback to it, version numbers may have been used, and whoever
        had leases belongs to the life before."""
        self._apply_covered(record)
        self.versions.skip(record["skip"])
        leased = [seq for seq, group in self.groups.items() if group.lease]
        self._apply_released({"given_back": leased, "failed": [], "dropped": []})
        for group in self.groups.values():
            group.rolled_back |= group.place == "open"
        if self.active is not None:
            self.replays = {self.active.step: self.active, **self.replays}
            self.active = None
        self.published = False
        self.lineage += 1

    def _apply_covered(self, record: Record) -> None:
        self.covered = record["step"]
        for step in [step for step in self.closed if step < self.covered]:
            for seq in self.closed.pop(step).groups:
                del self.groups[seq]
        kept = max((step for step in self.bounds if step <= self.covered), default=0)
        self.bounds = {step: bound for step, bound in self.bounds.items() if step >= kept}
        newest = self.versions.last_number
        self.versions.forget(min((group.first_version for group in self.groups.values()), default=newest))

    def _drop(self, seqs: Iterable[int], reason: str) -> None:
        for seq in seqs:
            group = self.groups.pop(seq)
            self.history.dropped(group.data_set, group.prompt_row, reason)
            self.unheld.discard(seq)
            self.waiting.discard(seq)
            self.dropped[reason] = self.dropped.get(reason, 0) + 1
            self.flat_in_step += reason == "zero_signal"
            self.drops_in_row += reason not in ("rolled_back", "data_changed")

    def state(self) -> dict[str, Any]:
        """Msgpack-able copy of everything; `Account.from_state` makes an equal account."""
        return {
            "schema": SCHEMA,
            "group_size": self.group_size,
            "versions": self.versions.state(),
            **{name: getattr(self, name) for name in _PLAIN},
            "dropped": dict(self.dropped),
            "history": self.history.to_state(),
            "tokens_by_staleness": sorted([age, count] for age, count in self.tokens_by_staleness.items()),
            "groups": [group.to_state() for _, group in sorted(self.groups.items())],
            "bounds": sorted([step, bound] for step, bound in self.bounds.items()),
            "unheld": sorted(self.unheld),
            "waiting": sorted(self.waiting),
            "active": self.active.to_state() if self.active else None,
            "closed": [plan.to_state() for _, plan in sorted(self.closed.items())],
            "replays": [plan.to_state() for _, plan in sorted(self.replays.items())],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Account:
        """Raises ValueError for a state of another schema."""
        if state.get("schema") != SCHEMA:
            raise ValueError(f"the saved account has schema {state.get('schema')!r}, this program reads {SCHEMA}; use the version that wrote it")
        account = cls(state["group_size"])
        account.versions = Versions.from_state(state["versions"])
        for name in _PLAIN:
            setattr(account, name, state[name] if name in state or name not in _LATER else 0)
        account.dropped = dict(state["dropped"])
        account.tokens_by_staleness, account.bounds = dict(state["tokens_by_staleness"]), dict(state.get("bounds", []))
        if "history" in state:
            account.history = History.from_state(state["history"])
        else:  # saved before there was one: its only data set had every group
            account.history.of("").given = account.history.of("").phase = account.next_seq
        account.groups = {saved["seq"]: Group.from_state({"size": account.group_size, **saved}) for saved in state["groups"]}
        account.unheld, account.waiting = set(state["unheld"]), set(state["waiting"])
        account.active = Plan.from_state(state["active"]) if state["active"] else None
        account.closed = {saved[0]: Plan.from_state(saved) for saved in state["closed"]}
        account.replays = {saved[0]: Plan.from_state(saved) for saved in state["replays"]}
        return account


_PLAIN = ("step", "lineage", "covered", "published", "next_seq", "num_trained", "drops_in_row", "flat_in_step", "num_kept_flat")
_LATER = ("flat_in_step", "num_kept_flat")  # not in the oldest states: nothing was counted then
