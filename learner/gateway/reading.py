"""What can be asked of the account: looks at everything and changes nothing. ledger.py adds what may change it."""

from __future__ import annotations

from collections.abc import Iterator

from learner.gateway.account import Account, Plan
from learner.gateway.groups import Group, SampleFacts, seq_of
from learner.gateway.terms import Counts, Limits, Row
from learner.gateway.versions import PolicyVersion


class Reading:
    """An account under its rules. Example: `Ledger(limits).counts().open`"""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.account = Account(limits.group_size)

    @property
    def step(self) -> int:
        """Newest policy step; after a rollback, the cut's."""
        return self.account.step

    @property
    def lineage(self) -> int:
        return self.account.lineage

    @property
    def published(self) -> PolicyVersion | None:
        """The version to sample from; None until the first publication after the start or a rollback."""
        return self.account.versions.newest if self.account.published else None

    @property
    def next_seq(self) -> int:
        """Sequence number of the next new group."""
        return self.account.next_seq

    @property
    def head_seq(self) -> int | None:
        """Oldest open group that is in no batch; None when there is none."""
        return min((seq for seq, _ in self.account.outside()), default=None)

    @property
    def oldest_opened_at(self) -> float | None:
        """Wall-clock seconds of the first lease of the oldest open group; None when none is open."""
        return min((group.opened_at for group in self.account.groups.values() if group.place != "closed"), default=None)

    @property
    def exhausted(self) -> str:
        """Why the run cannot go on; empty while it can."""
        drops, bound, flat = self.account.drops_in_row, self.limits.max_consecutive_drops, self.account.flat_in_step
        reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.account.dropped.items()))
        if self.limits.flat_fails and self.limits.max_flat_a_step is not None and flat > self.limits.max_flat_a_step:
            return (
                f"{flat} groups without signal were dropped for one batch, more than filter.max_flat_a_step={self.limits.max_flat_a_step} with then=fail (dropped so far: {reasons}); "
                "choose prompts of middling difficulty (docs/data.md), raise max_flat_a_step, or set then=train"
            )
        if drops <= bound:
            return ""
        return (
            f"{drops} groups were dropped one after another, more than filter.max_consecutive_drops={bound} (dropped so far: {reasons}); "
            "make the prompts or the reward give some signal, loosen `filter`, or raise max_consecutive_drops"
        )

    def room(self) -> int:
        """New groups that may be opened now: max_open - open; 0 while nothing is published."""
        return max(0, self.max_open - self.account.num_open) if self.account.published else 0

    @property
    def bound(self) -> int:
        """Staleness that a group opened now is admitted under, in steps."""
        admitted = self.account.bound if self.limits.adaptive is not None else None
        return self.limits.max_staleness if admitted is None else admitted

    @property
    def max_open(self) -> int:
        """Open groups at which no further one is opened now."""
        return self.limits.max_open(self.bound)

    def bound_of(self, seq: int) -> int:
        """Staleness that a group was opened under: what it is held to, whatever the bound is now."""
        bound = self.account.groups[seq].bound
        return self.limits.max_staleness if bound is None else bound

    def next_release(self) -> Group | None:
        """The group to lease again, lowest seq first; None when there is none. It goes before any new group.

        A group first leased past the step that a rollback went back to waits until the replay has come that far.
        """
        ready = (seq for seq in self.account.unheld if self.account.published and self.account.groups[seq].floor_step <= self.step)
        seq = min(ready, default=None)
        return None if seq is None else self.account.groups[seq]

    def next_lapse(self) -> float | None:
        """When `expire` will next have something to do; None when nothing is leased."""
        return min((group.lease.lapse_at for group in self.account.groups.values() if group.lease), default=None)

    def latest_lapse(self) -> float | None:
        """When the last running lease lapses; None when nothing is leased."""
        return max((group.lease.lapse_at for group in self.account.groups.values() if group.lease), default=None)

    def group(self, group_id: str) -> Group | None:
        """A group to look at, never to change; None when it is unknown, dropped, or trained and covered."""
        seq = seq_of(group_id)
        return None if seq is None else self.account.groups.get(seq)

    def num_leases(self, holder: str) -> int:
        return sum(1 for group in self.account.groups.values() if group.lease and group.lease.holder == holder)

    def holders(self) -> set[str]:
        """Whoever holds a lease."""
        return {group.lease.holder for group in self.account.groups.values() if group.lease}

    @property
    def progress_bytes(self) -> int:
        """Tokens and log-probs that are kept of unfinished samples."""
        return sum(part.num_bytes for group in self.account.groups.values() for part in group.parts.values())

    def counts(self) -> Counts:
        account = self.account
        return Counts(leased=account.next_seq, trained=account.num_trained, dropped=dict(account.dropped), open=account.num_open, waiting=len(account.waiting))

    def num_uncovered(self, policy_step: int) -> int:
        """Groups that a cut of `policy_step` does not make superfluous: open ones, and those closed since."""
        account = self.account
        return account.num_open + sum(len(plan.groups) for step, plan in account.closed.items() if step >= policy_step)

    def trained_tokens_by_staleness(self) -> dict[int, int]:
        return {age: count for age, count in sorted(self.account.tokens_by_staleness.items()) if count}

    def retained(self) -> Iterator[tuple[str, int]]:
        """(group_id, sample_index) of every payload that may still be needed: open groups, and closed ones that no cut covers."""
        for group in self.account.groups.values():
            for index in sorted(group.samples):
                yield group.group_id, index

    def unfinished(self) -> Iterator[tuple[str, int]]:
        """As `retained`, of the groups that are not closed: what the newest policy's cut needs to stand alone."""
        for group in self.account.groups.values():
            for index in sorted(group.samples) if group.place != "closed" else ():
                yield group.group_id, index

    def table(self, plan: Plan) -> list[Row]:
        """Every sample of a plan, groups in order of entry, samples by index."""
        groups = (self.account.groups[seq] for seq in plan.groups)
        return [
            Row(group_id=group.group_id, sample_index=index, facts=facts, staleness=self.age_of(facts, plan.step), data_set=group.data_set, baseline=index == group.baseline_index)
            for group in groups
            for index, facts in sorted(group.samples.items())
        ]

    def age_of(self, facts: SampleFacts, at_step: int) -> int:
        """Staleness of a sample's oldest token in the step that starts from policy `at_step`; 0 for one that failed before its first."""
        return max((self.account.versions.age(version, at_step) for version, _ in facts.spans), default=0)

    def oldest_of(self, seq: int) -> int:
        """Staleness of the oldest usable token of a group, were it trained now; 0 where none is usable."""
        return max((self.age_of(facts, self.step) for facts in self.account.groups[seq].usable()), default=0)
