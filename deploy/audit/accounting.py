"""Follows the records of the journal with a bookkeeping of its own and says where they contradict it.

A group is leased once (`opened`), in order, and ends as trained or dropped for one reason; until then it is open. It is trained by a plan: `planned`
makes it the batch of the present step, `published` with `closed` ends that batch and makes the next policy. `rolled_back` opens the batches
from a step on again; they are then due in their order before anything else (replay), or their groups are free again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from deploy.audit import payload
from deploy.audit.entry import Entry
from deploy.audit.evaluations import Evaluations
from deploy.audit.findings import Findings
from deploy.audit.payload import Sample, group_name, of_record
from deploy.audit.terms import Close, Group, Plan, Rules
from deploy.audit.versions import Publications

LEASED, ENDED, PLANNED, ONCE, STALE, TOKENS = (
    "every group is leased once, in order", "a group ends once", "plans hold complete open groups, once", "no group is trained twice",
    "no trained token is older than max_staleness", "a plan's tokens by staleness are those of its samples",
)  # fmt: skip
BOUND = "the bound on staleness moves one step at a time, within its limits, and a group keeps its own"
PROGRESS = "reports of an unfinished sample follow each other"
EARLY = ("no_baseline", "unscored", "unusable", "flat_early")  # may be known before a group is complete
SIZES, BASELINE = "a group has as many samples as the configuration says", "a trained group's baseline has a score"
CLOSED, VERSIONS, SAMPLES, KINDS, HELD = "closes match plans", "versions rise and are never used twice", "a sample is booked once", "records are known", "a trained sample's payload is in the journal"


class Accounting:
    """`follow` every entry in order; then `groups`, `closes` and the totals tell how the run stands."""

    def __init__(self, rules: Rules, findings: Findings, prompts: list[bytes] | None, *, prompts_since: int = 0) -> None:
        """prompts_since: number of the first group that has a prompt of `prompts`; older ones had other data."""
        self._rules, self.findings, self._prompts, self._prompts_since = rules, findings, prompts, prompts_since
        self.versions = Publications()
        self.evaluations = Evaluations(findings, self.versions)
        self.groups: dict[int, Group] = {}
        self.next_group = self.step = self.lineage = self.incarnation = 0
        self.first_told = 1  # older versions are not in the journal any more
        self.published = False
        self.active: Plan | None = None
        self.closed: dict[int, Plan] = {}  # by step, of the surviving history
        self.due: dict[int, Plan] = {}  # by step: to be trained again after a rollback
        self.closes: list[Close] = []  # all of them, undone or not
        self.announced: dict[tuple[int, int], tuple[int, int]] = {}  # by position of a record that a cut may follow: (step, lineage)
        self.num_trained_before = 0  # of a run whose first segments are gone: what its oldest cut had trained and forgotten
        self.dropped: Counter[str] = Counter()
        self.bounds: dict[int, int] = {}  # admitted staleness by step of its publication, where it moves

    @property
    def bound(self) -> int | None:
        return self.bounds[max(self.bounds)] if self.bounds else None

    @property
    def num_trained(self) -> int:
        return self.num_trained_before + sum(len(plan.groups) for plan in self.closed.values())

    @property
    def num_open(self) -> int:
        return sum(group.place in ("open", "planned") for group in self.groups.values())

    def _must(self, holds: bool, rule: str, entry: Entry, what: str) -> bool:
        return self.findings.must(holds, rule, entry.where, what)

    def follow(self, entry: Entry) -> None:
        """One record. What contradicts the bookkeeping is a finding, and the bookkeeping follows the record as far as it can."""
        kind = str(entry.record.get("type"))
        handler = self._on_evaluation if kind.startswith("evaluation_") else getattr(self, f"_on_{kind}", None)
        if not self._must(handler is not None, KINDS, entry, f"record of type {entry.record.get('type')!r}") or handler is None:
            return
        try:
            handler(entry.record, entry)
        except (KeyError, TypeError, ValueError) as error:
            self._must(False, KINDS, entry, f"a record {entry.record['type']!r} that lacks or misspells something: {type(error).__name__}: {error}")

    def note_payload(self, seq: int, index: int, data: bytes, booked: Sample | None, where: str) -> Sample | None:
        """Checks and remembers the payload of a sample; what it says. booked: None, what the group has booked."""
        group, prompt = self.groups.get(seq), None
        if group is not None:
            group.has_payload.add(index)
            booked = booked or group.samples.get(index)
            if self._prompts is not None and seq >= self._prompts_since and 0 <= group.prompt_row < len(self._prompts):
                prompt = self._prompts[group.prompt_row]
        return payload.check(data, (seq, index), booked, prompt, where, self.findings)

    def note_before(self, entry: Entry) -> None:
        """A record that the cut to begin from has booked already: of those, only payloads matter."""
        record = entry.record
        if record["type"] == "submitted":
            self.note_payload(record["seq"], record["sample_index"], entry.payload, of_record(record), entry.where)

    # Leases and samples

    def _on_opened(self, record: dict[str, Any], entry: Entry) -> None:
        seq = record["seq"]
        missing = [group_name(number) for number in range(self.next_group, min(seq, self.next_group + 3))]
        if self._must(seq >= self.next_group, LEASED, entry, f"group {group_name(seq)} is leased for the first time again"):
            self._must(seq == self.next_group, LEASED, entry, f"group {group_name(seq)} follows {group_name(self.next_group - 1)}: {seq - self.next_group} are missing, {', '.join(missing)} …")
            self.groups[seq] = self._new_group(record, entry)
            self.next_group = seq + 1
        current = self.published and record["version"] == self.versions.newest
        self._must(current, LEASED, entry, f"group {group_name(seq)} is leased for version {record['version']}, the newest published is {self.versions.newest if self.published else 'none'}")

    def _new_group(self, record: dict[str, Any], entry: Entry) -> Group:
        rules, baseline, size = self._rules, record.get("baseline", False), record.get("size", self._rules.group_size)
        wanted, name = rules.size_of(record.get("data_set", ""), baseline=baseline), group_name(record["seq"])
        self._must(size == wanted, SIZES, entry, f"group {name} has {size} samples, the configuration says {wanted}{', the greedy one counted in' if baseline else ''}")
        self._must(rules.greedy in (None, baseline), SIZES, entry, f"group {name} is {'' if baseline else 'not '}given a greedy answer as its baseline, which the run's algorithm has{' not' if baseline else ''}")
        self._must(record.get("bound") == self.bound, BOUND, entry, f"group {name} is admitted under {record.get('bound')}, the bound is {self.bound}")
        return Group(first_version=record["version"], prompt_row=record["prompt_row"], size=size, baseline=baseline, bound=self.bound, extra=record.get("extra", 0))

    def _on_data(self, record: dict[str, Any], entry: Entry) -> None:
        """What is kept of each data set; with `restart` the data are others, and what was not complete is dropped."""
        if record["restart"]:
            self._drop([seq for seq, group in self.groups.items() if group.place == "open" and len(group.samples) < group.size], "data_changed", entry)

    def _on_leased_again(self, record: dict[str, Any], entry: Entry) -> None:
        self._open(record["seq"], "leased again", entry)

    def _on_submitted(self, record: dict[str, Any], entry: Entry) -> None:
        seq, index = record["seq"], record["sample_index"]
        name = f"sample ({group_name(seq)}, {index})"
        sample = self.note_payload(seq, index, entry.payload, of_record(record), entry.where)
        group = self._open(seq, f"submitted (sample {index})", entry)
        if group is None or sample is None:
            return
        self._must(0 <= index < group.size + group.extra, SAMPLES, entry, f"{name}: a group has {group.size + group.extra} samples")
        self._must(len(group.samples) < group.size, SAMPLES, entry, f"{name} is booked in a group that is complete with {group.size}")
        self._must(index not in group.samples, SAMPLES, entry, f"{name} is booked a second time")
        for version, _ in sample.tokens:
            known = version in self.versions.by_number and version >= group.first_version
            self._must(known, VERSIONS, entry, f"{name}: drawn by version {version}, but it was leased for {group.first_version} or newer and {self.versions.newest} is the newest published")
        group.samples[index] = sample
        if record["dropped"]:
            whole = len(group.samples) == group.size or record["dropped"] in EARLY
            self._must(whole, ENDED, entry, f"group {group_name(seq)} is dropped as {record['dropped']} with {len(group.samples)} of {group.size} samples")
            self._drop([seq], record["dropped"], entry)

    def _on_progressed(self, record: dict[str, Any], entry: Entry) -> None:
        """Tokens of a sample that is not submitted: of an open, lent group, each report from where the one before ended."""
        seq, index = record["seq"], record["sample_index"]
        group, name = self._open(seq, f"drawn on (sample {index})", entry), f"sample ({group_name(seq)}, {index})"
        num_tokens, end = len(record["ids"]) // 4, record["start"] + len(record["ids"]) // 4
        if group is None:
            return
        self._must(0 <= index < group.size + group.extra and index not in group.samples, SAMPLES, entry, f"{name} is reported, and is booked or none of {group.size}")
        known = group.reported.get(index, 0)
        self._must(record["start"] == known, PROGRESS, entry, f"{name} is reported from token {record['start']} on, {known} were reported before")
        self._must(len(record["logprobs"]) == 4 * num_tokens and sum(count for _, count in record["spans"]) == end, PROGRESS, entry, f"{name}: log-probs or spans of a report do not fit its tokens")
        for version, _ in record["spans"]:
            self._must(version in self.versions.by_number and version >= group.first_version, VERSIONS, entry, f"{name}: reported as drawn by version {version}, but it was leased for {group.first_version} or newer")
        group.reported[index] = end

    def _on_released(self, record: dict[str, Any], entry: Entry) -> None:
        for seq in (*record["given_back"], *record["failed"]):
            self._open(seq, "released", entry)
        self._drop(record["dropped"], "attempts", entry)

    def _on_dropped(self, record: dict[str, Any], entry: Entry) -> None:
        self._drop(record["groups"], record["reason"], entry)

    def _open(self, seq: int, what: str, entry: Entry) -> Group | None:
        group = self.groups.get(seq)
        if not self._must(group is not None, LEASED, entry, f"group {group_name(seq)} is {what}, but no record leased it first"):
            return None
        assert group is not None
        return group if self._must(group.place == "open", ENDED, entry, f"group {group_name(seq)} is {what}, but it is {group.place}") else None

    def _drop(self, seqs: list[int], reason: str, entry: Entry) -> None:
        for seq in seqs:
            group = self._open(seq, f"dropped: {reason}", entry)
            if group is not None:
                group.place = f"dropped: {reason}"
                self.dropped[reason] += 1

    # Plans and versions

    def _on_planned(self, record: dict[str, Any], entry: Entry) -> None:
        self._drop(record["dropped"], "rolled_back", entry)
        plan = Plan(step=record["step"], groups=tuple(record["groups"]), tokens=tuple((age, count) for age, count in record["tokens"]))
        self._must(plan.step == self.step and self.published and self.active is None, PLANNED, entry, f"the batch of step {plan.step} is planned at step {self.step} (published: {self.published}, in training: {self.active is not None})")
        due = self.due.pop(plan.step, None)
        if due is not None:
            self._must(due.groups == plan.groups, PLANNED, entry, f"step {plan.step} trains {_names(plan.groups)} after a rollback, before it was {_names(due.groups)}")
        self._must(0 < len(plan.groups) <= self._rules.groups_per_step, PLANNED, entry, f"the batch of step {plan.step} has {len(plan.groups)} groups, groups_per_step is {self._rules.groups_per_step}")
        for seq, times in Counter(plan.groups).items():
            self._must(times == 1, ONCE, entry, f"group {group_name(seq)} is {times} times in the batch of step {plan.step}")
            self._plan_group(seq, plan.step, "planned" if due is not None else "open", entry)
        self._check_ages(plan, entry)
        self.active = plan

    def _plan_group(self, seq: int, step: int, expected: str, entry: Entry) -> None:
        group = self.groups.get(seq)
        name = f"group {group_name(seq)} in the batch of step {step}"
        if not self._must(group is not None, PLANNED, entry, f"{name} was never leased") or group is None:
            return
        self._must(group.place != "trained", ONCE, entry, f"{name} is trained already")
        self._must(group.place in (expected, "trained"), PLANNED, entry, f"{name} is {group.place}")
        whole = len(group.samples) == group.size
        self._must(whole, PLANNED, entry, f"{name} has the samples {sorted(group.samples)} of {group.size}")
        missing = sorted(set(group.samples) - group.has_payload)
        self._must(not missing, HELD, entry, f"{name}: the payloads of samples {missing} are not there")
        if group.baseline:
            greedy = group.samples.get(group.size - 1)
            self._must(greedy is not None and greedy.usable, BASELINE, entry, f"{name} has no scored greedy answer (sample {group.size - 1})")
        group.place = "planned"

    def _check_ages(self, plan: Plan, entry: Entry) -> None:
        tokens: Counter[int] = Counter()
        for seq in plan.groups:
            samples = self.groups[seq].trained if seq in self.groups else {}
            for index, sample in samples.items():
                for version, count in sample.tokens:
                    age = self.versions.age(version, plan.step)
                    admitted = self.groups[seq].bound
                    bound = self._rules.max_staleness if admitted is None else admitted
                    self._must(age is not None and 0 <= age <= bound, STALE, entry, f"sample ({group_name(seq)}, {index}) in step {plan.step}: tokens of version {version} are {age} steps old, max_staleness is {bound}")
                    tokens[age if age is not None else -1] += count
        own = tuple(sorted((age, count) for age, count in tokens.items() if count))
        self._must(own == plan.tokens, TOKENS, entry, f"step {plan.step}: {dict(plan.tokens)} planned, {dict(own)} by its samples")

    def _on_published(self, record: dict[str, Any], entry: Entry) -> None:
        version, step = record["version"], record["step"]
        self._must(version > self.versions.newest, VERSIONS, entry, f"version {version} of step {step} is published after version {self.versions.newest}")
        self._must(record["lineage"] == self.lineage, VERSIONS, entry, f"version {version} says lineage {record['lineage']}, after {self.lineage} rollbacks")
        if record["closed"]:
            self._close(record, entry)
        else:
            fits = step == self.step and not self.published
            self._must(fits, CLOSED, entry, f"version {version} is step {step} without a batch, at step {self.step} (published: {self.published})")
        self.step, self.published = step, True
        self.versions.add(version, self.lineage, step)
        self._move_bound(record, entry)
        if record["will_save"]:
            self.announced[entry.position] = (step, self.lineage)

    def _move_bound(self, record: dict[str, Any], entry: Entry) -> None:
        before, now, limits = self._rules.max_staleness if self.bound is None else self.bound, record.get("bound"), self._rules.adaptive
        self._must((now is None) == (limits is None), BOUND, entry, f"version {record['version']} says bound {now}, staleness.adaptive is {'not set' if limits is None else 'set'}")
        if now is not None and limits is not None:
            self._must(limits[0] <= now <= limits[1] and abs(now - before) <= 1, BOUND, entry, f"the bound goes from {before} to {now}, one step at a time from {limits[0]} to {limits[1]} is allowed")
            self._must(now == before or bool(record["closed"]), BOUND, entry, f"the bound goes from {before} to {now} without a step that was trained")
        if now is not None:
            self.bounds[record["step"]] = now

    def _close(self, record: dict[str, Any], entry: Entry) -> None:
        plan, step = self.active, record["step"]
        if self._must(plan is not None, CLOSED, entry, f"step {step} is closed, but no batch is in training") and plan is not None:
            self._must(step == plan.step + 1, CLOSED, entry, f"the batch of step {plan.step} is closed as step {step}")
            for seq in plan.groups:
                if seq in self.groups:
                    self.groups[seq].place = "trained"
            self.closed[plan.step] = plan
            self.closes.append(Close(plan=plan, version=record["version"], lineage=self.lineage, where=entry.where, incarnation=self.incarnation))
        self.active = None

    def _on_rolled_back(self, record: dict[str, Any], entry: Entry) -> None:
        cut, replay = record["step"], record["replay"]
        self._must(0 <= cut <= self.step, CLOSED, entry, f"rolled back to step {cut} from step {self.step}")
        undone = [self.closed.pop(step) for step in sorted(self.closed) if step >= cut]
        waiting = [*undone, *([self.active] if self.active else []), *self.due.values()]
        for seq in (seq for plan in waiting for seq in plan.groups if seq in self.groups):
            self.groups[seq].place = "planned" if replay else "open"
        self.due = {plan.step: plan for plan in waiting} if replay else {}
        if not replay:
            self.versions.part(cut)
        self.active, self.step, self.published = None, cut, False
        self.bounds = {step: bound for step, bound in self.bounds.items() if step <= cut}
        self.lineage += 1

    # The gateway's own

    def _on_covered(self, record: dict[str, Any], entry: Entry) -> None:
        self._must(record["step"] <= self.step, CLOSED, entry, f"a cut of step {record['step']} covers what is only at step {self.step}")

    def _on_registered(self, record: dict[str, Any], entry: Entry) -> None:
        fits = record["policy_step"] == self.step and record["lineage"] == self.lineage
        self._must(fits, CLOSED, entry, f"a trainer comes on duty at step {record['policy_step']} of lineage {record['lineage']}, the account is at step {self.step} of lineage {self.lineage}")
        self.incarnation = record["incarnation"]

    def _on_continued(self, record: dict[str, Any], entry: Entry) -> None:
        """From a cut alone: what came after it is unknown, so versions may have been used that no record tells of."""
        self._must(record["step"] == self.step, CLOSED, entry, f"the run is continued from step {record['step']}, the cut is of step {self.step}")
        if self.active is not None:
            self.due = {self.active.step: self.active, **self.due}
        self.active, self.published = None, False
        self.lineage += 1
        self.versions.newest += record["skip"]
        self.first_told = self.versions.newest + 1

    def _on_cut_asked(self, record: dict[str, Any], entry: Entry) -> None:
        self._must(record["step"] == self.step, CLOSED, entry, f"a cut of step {record['step']} is asked for at step {self.step}")
        self.announced[entry.position] = (record["step"], self.lineage)

    def _on_payload(self, record: dict[str, Any], entry: Entry) -> None:
        """Put back from a cut into a journal that lacked it."""
        self.note_payload(record["seq"], record["sample_index"], entry.payload, None, entry.where)

    def _on_evaluation(self, record: dict[str, Any], entry: Entry) -> None:
        self._must(self.evaluations.follow(record, entry), KINDS, entry, f"record of type {record['type']!r}")

    def _on_assembled(self, record: dict[str, Any], entry: Entry) -> None:
        pass

    def _on_prompts(self, record: dict[str, Any], entry: Entry) -> None:
        pass


def _names(seqs: tuple[int, ...]) -> str:
    return " ".join(map(group_name, seqs))
