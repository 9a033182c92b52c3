"""The account of every group. Pure: no clock, no IO; each mutation checks, changes the state and returns the record it made.

A mutation is one record, so a torn journal never holds half of one. The caller journals records in the order it got them, and
answers the outside only once they are durable. Conservation holds always: leased = trained + sum of dropped + open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from learner.algorithms.adaptive_staleness import adapted_bound
from learner.gateway.account import Account, Plan, Record
from learner.gateway.groups import Group, Lease, SampleFacts, early_verdict, verdict
from learner.gateway.history import Rules
from learner.gateway.parts import Part, digest_of
from learner.gateway.reading import Reading
from learner.gateway.terms import Counts, Limits, Reported, Row, Submission
from learner.gateway.versions import PolicyVersion, StalenessBroken
from learner.gateway.window import choose

__all__ = ["Counts", "Ledger", "Limits", "Plan", "Record", "Row", "SampleFacts", "Submission"]


class Ledger(Reading):
    """See the module. `now` and `lapse_at` are seconds of the wall clock: leases outlive the process that lent them."""

    def set_data(self, rules: Mapping[str, Rules], *, restart: bool = False) -> Record | None:
        """What is to be kept of each data set. restart: the data are others; unfinished groups are dropped("data_changed"). None: nothing changed."""
        kept = {name: one.rules for name, one in self.account.history.sets.items()}
        if not restart and all(kept.get(name, Rules()) == wanted for name, wanted in rules.items()):
            return None
        return self._made(type="data", rules={name: wanted.to_record() for name, wanted in rules.items()}, restart=restart)

    def open_group(self, *, holder: str, lease_id: str, now: float, lapse_at: float, prompt_id: str, prompt_row: int, data_set: str = "", pick: Mapping[str, Any] = {}) -> tuple[Group, Record]:
        """First lease of the next group. Only with `room()` and nothing to lease again. pick: see history.py."""
        version = self.published
        assert version is not None and self.room() > 0, "no room for a new group"
        lease = asdict(Lease(lease_id=lease_id, holder=holder, lapse_at=lapse_at))
        seq = self.next_seq
        size = self.limits.size_of(data_set)
        more: dict[str, Any] = {"data_set": data_set, "size": size if size != self.limits.group_size else None, "baseline": data_set in self.limits.baselines, "extra": self.limits.oversample, "pick": dict(pick)}
        bound = {} if self.limits.adaptive is None else {"bound": self.bound}
        record = self._made(type="opened", seq=seq, prompt_id=prompt_id, prompt_row=prompt_row, lease=lease, now=now, version=version.number, **bound, **{key: value for key, value in more.items() if value})
        return self.account.groups[seq], record

    def lease_again(self, *, holder: str, lease_id: str, lapse_at: float) -> tuple[Group, Record]:
        """Leases `next_release()`, which must not be None. Its `samples` are done and not to be drawn again."""
        group = self.next_release()
        assert group is not None, "no group waits to be leased again"
        lease = asdict(Lease(lease_id=lease_id, holder=holder, lapse_at=lapse_at))
        return group, self._made(type="leased_again", seq=group.seq, lease=lease)

    def submit(self, group_id: str, sample_index: int, facts: SampleFacts) -> Submission:
        """Takes a finished sample, whoever sends it: the first complete one of an identity wins.

        Raises ValueError for an index outside the group, or a version that was never published or is older than the lease allowed.
        """
        group = self.group(group_id)
        num_drawn = group.num_drawn if group else self.limits.largest_group
        if not 0 <= sample_index < num_drawn:
            raise ValueError(f"sample_index={sample_index} is outside the group of {num_drawn} samples")
        if group is None:
            return Submission(status="unwanted", group="gone", reason=f"group {group_id} is unknown, dropped, or trained and saved")
        if sample_index in group.samples:
            return Submission(status="duplicate", group="complete" if group.complete else "open")
        if group.complete:
            return Submission(status="unwanted", group="complete", reason=f"group {group_id} is complete with {group.size} of {num_drawn} samples")
        self._check_versions(group, facts.spans)
        complete = len(group.samples) + 1 == group.size
        dropped = self._verdict(group, {**group.samples, sample_index: facts}, complete=complete)
        kept = dropped if dropped == "zero_signal" and self._keeps_flat() else ""
        dropped = "" if kept else dropped
        record = {"type": "submitted", "seq": group.seq, "sample_index": sample_index, "facts": facts.to_record(), "dropped": dropped, **({"kept": kept} if kept else {})}
        self.account.add_sample(group, sample_index, facts, dropped, kept=kept)
        outcome: Literal["open", "complete", "dropped"] = "dropped" if dropped else "complete" if complete else "open"
        return Submission(status="accepted", group=outcome, reason=dropped, record=record)

    def report(self, group_id: str, sample_index: int, *, lease_id: str, part: Part, digest_before: int) -> Reported:
        """Adds to what is known of an unfinished sample, when the group's present holder reports it and its tokens follow the known ones.

        Raises ValueError for an index outside the group, or a version that was never published or is older than the lease allowed.
        """
        group = self.group(group_id)
        if group is None or sample_index in group.samples or group.complete:
            return Reported(status="unwanted", num_tokens=0)
        if not 0 <= sample_index < group.num_drawn:
            raise ValueError(f"sample_index={sample_index} is outside the group of {group.num_drawn} samples")
        known = group.parts.get(sample_index)
        num_tokens = known.end if known else 0
        if group.lease is None or group.lease.lease_id != lease_id:
            return Reported(status="foreign", num_tokens=num_tokens)
        if part.start != num_tokens:
            return Reported(status="elsewhere", num_tokens=num_tokens)
        if digest_before != digest_of(known.ids if known else b"") or (known and known.finish):
            return Reported(status="foreign", num_tokens=num_tokens)
        self._check_versions(group, part.spans)
        if known:
            known.followed_by(part)  # raises
        if self.progress_bytes + part.num_bytes > self.limits.max_progress_bytes:
            return Reported(status="full", num_tokens=num_tokens)
        return Reported(status="accepted", num_tokens=part.end, record=self._made(type="progressed", seq=group.seq, sample_index=sample_index, **part.to_record()))

    def _verdict(self, group: Group, samples: Mapping[int, SampleFacts], *, complete: bool) -> str:
        limits = self.limits
        zero_signal = limits.zero_signals.get(group.data_set, limits.zero_signal)
        if not complete:
            stop_flat_after = None if self._keeps_flat() else limits.stop_flat_after
            return early_verdict(
                samples, size=group.size, min_usable=limits.min_usable, zero_signal=zero_signal, unscored=limits.unscored, stop_flat_after=stop_flat_after, baseline_index=group.baseline_index
            )
        return verdict(samples, min_usable=limits.min_usable, zero_signal=zero_signal, unscored=limits.unscored, baseline_index=group.baseline_index)

    def _keeps_flat(self) -> bool:
        """Whether so many groups without signal were dropped for the next batch that it takes the others as they are."""
        limits = self.limits
        return limits.max_flat_a_step is not None and not limits.flat_fails and self.account.flat_in_step >= limits.max_flat_a_step

    def release_holder(self, holder: str, *, in_good_order: bool) -> Record | None:
        """All leases of a replica that is gone, or (in good order: no attempt is counted) that said goodbye. None: it had none."""
        return self._release([g for g in self.account.groups.values() if g.lease and g.lease.holder == holder], in_good_order)

    def release_lease(self, lease_id: str, *, in_good_order: bool) -> Record | None:
        """One lease; None when it has ended already."""
        return self._release([g for g in self.account.groups.values() if g.lease and g.lease.lease_id == lease_id], in_good_order)

    def expire(self, now: float) -> Record | None:
        """Leases whose lapse_at has come; None: there are none."""
        return self._release([g for g in self.account.groups.values() if g.lease and g.lease.lapse_at <= now], False)

    def form(self, policy_step: int, *, data_ended: bool = False) -> tuple[Plan | None, Record | None]:
        """The batch of `policy_step`; (None, ...) while P groups cannot enter yet. Asking again gives the same plan.

        After a rollback the plans of before come first, in order. data_ended: there are no more prompts, so the last batch may be
        short once every open group is complete; with no open group left there is none (see `counts().open`).
        A record without a plan frees places: groups that a rollback left too old were dropped("rolled_back").
        Raises StalenessBroken when a group past the bound reached the batch: a defect.
        """
        account = self.account
        assert account.published and policy_step == account.step, f"batch {policy_step} asked, {account.step} is due (published: {account.published})"
        if account.active is not None:
            return account.active, None
        if policy_step in account.replays:
            return self._plan(account.replays[policy_step].groups, [])
        stale = [seq for seq in sorted(account.waiting) if account.groups[seq].rolled_back and self.oldest_of(seq) > self.bound_of(seq)]
        outside = [(seq, complete) for seq, complete in account.outside() if seq not in stale]
        wanted = min(self.limits.groups_per_step, len(outside)) if data_ended else self.limits.groups_per_step
        chosen = choose(outside, num_groups=wanted, window=self.limits.window)
        if chosen and len(chosen) == wanted:
            return self._plan(tuple(chosen), stale)
        return None, self._made(type="dropped", groups=stale, reason="rolled_back") if stale else None

    def publish(self, policy_step: int, *, mismatch: float | None = None) -> tuple[PolicyVersion, Record | None]:
        """Closes the batch in training and publishes the policy it made; or, first after the start or a rollback, publishes the
        policy that the run goes on from. Asking again gives the same version and no record.

        mismatch: measured in the step just closed; the bound of groups opened from now on follows it. None: nothing was measured.
        """
        account = self.account
        if account.published and policy_step == account.step:
            return account.versions[account.versions.last_number], None
        first = not account.published and policy_step == account.step
        closes = account.active is not None and policy_step == account.step + 1
        assert first or closes, f"policy {policy_step} published, the account is at {account.step} (batch in training: {account.active is not None})"
        number = account.versions.last_number + 1
        record = self._made(type="published", version=number, step=policy_step, closed=closes, **self._next_bound(mismatch))
        return account.versions[number], record

    def _next_bound(self, mismatch: float | None) -> dict[str, int]:
        """What the record `published` says of the bound: nothing where it never moves."""
        adaptive = self.limits.adaptive
        if adaptive is None:
            return {}
        if mismatch is None:
            return {"bound": self.bound}
        return {"bound": adapted_bound(self.bound, mismatch, low=adaptive.low, high=adaptive.high, lowest=adaptive.lowest, highest=adaptive.highest)}

    def rollback(self, policy_step: int, *, replay: bool = True) -> Record | None:
        """Back to the cut of `policy_step`: later batches are open again and will be replayed in order. None: nothing to undo.

        replay=False gives their groups back to the queue instead; what was drawn past the cut then counts its way back
        (`versions.staleness`), and groups past the bound are dropped("rolled_back") when a batch is formed.
        Raises ValueError for a step that the account cannot go back to.
        """
        account = self.account
        if not account.published and policy_step == account.step and (replay or not account.replays):
            return None
        if not account.covered <= policy_step <= account.step:
            raise ValueError(
                f"the account cannot go back to step {policy_step}: it is at {account.step}, and what was trained before step "
                f"{account.covered} is forgotten, since a cut covered it; restore a cut from {account.covered} to {account.step}"
            )
        return self._made(type="rolled_back", step=policy_step, replay=replay)

    def cover(self, policy_step: int) -> Record | None:
        """The oldest cut that will ever be restored is `policy_step`: what was trained before may be forgotten. None: it was."""
        assert policy_step <= self.step, f"cut of step {policy_step}, the account is at {self.step}"
        return self._made(type="covered", step=policy_step) if policy_step > self.account.covered else None

    # State

    def apply(self, record: Record) -> None:
        """Replays one record of the journal."""
        self.account.apply(record)

    def state(self) -> dict[str, Any]:
        return self.account.state()

    @classmethod
    def from_state(cls, limits: Limits, state: dict[str, Any]) -> Ledger:
        """Raises ValueError for another schema or group size."""
        ledger = cls(limits)
        ledger.account = Account.from_state(state)
        if ledger.account.group_size != limits.group_size:
            raise ValueError(f"sampling.group_size={limits.group_size}, but the saved account has groups of {ledger.account.group_size}; keep it, or start a new run folder")
        return ledger

    def _made(self, **record: Any) -> Record:
        self.account.apply(record)
        return record

    def _release(self, groups: list[Group], in_good_order: bool) -> Record | None:
        if not groups:
            return None
        seqs = sorted(group.seq for group in groups)
        if in_good_order:
            return self._made(type="released", given_back=seqs, failed=[], dropped=[])
        out = [seq for seq in seqs if self.account.groups[seq].attempts >= self.limits.max_attempts]
        return self._made(type="released", given_back=[], failed=seqs, dropped=out)

    def _check_versions(self, group: Group, spans: tuple[tuple[int, int], ...]) -> None:
        for version, _ in spans:
            if version not in self.account.versions or version < group.first_version:
                raise ValueError(
                    f"group {group.group_id}: a span names version {version}, but the lease asked for {group.first_version} or newer "
                    f"and the newest published is {self.account.versions.last_number}"
                )

    def _plan(self, seqs: tuple[int, ...], stale: list[int]) -> tuple[Plan, Record]:
        tokens: dict[int, int] = {}
        for seq in seqs:
            if (age := self.oldest_of(seq)) > self.bound_of(seq):
                raise StalenessBroken(f"group {self.account.groups[seq].group_id} is {age} steps old in the batch of step {self.step}, more than max_staleness={self.bound_of(seq)} at its first lease")
            for version, count in (span for facts in self.account.groups[seq].usable() for span in facts.spans):
                token_age = self.account.versions.age(version, self.step)
                tokens[token_age] = tokens.get(token_age, 0) + count
        pairs = [[age, count] for age, count in sorted(tokens.items()) if count]
        record = self._made(type="planned", step=self.step, groups=list(seqs), tokens=pairs, dropped=stale)
        assert self.account.active is not None
        return self.account.active, record
