"""Two bookkeepings that share no code must agree: the audit finds every random life of the ledger clean, rollbacks included, and it
finds the lives of a ledger with a known mistake in it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from deploy.audit.accounting import BASELINE, BOUND, SIZES, STALE, Accounting
from deploy.audit.entry import Entry
from deploy.audit.findings import Findings
from deploy.audit.payload import check
from deploy.audit.terms import Rules
from learner.gateway.groups import Group, SampleFacts
from learner.gateway.ledger import Ledger, Limits
from learner.gateway.terms import Adaptive
from protos.arrays import pack_floats, pack_ids, pack_mask
from protos.trajectory.v1alpha1 import trajectory_pb2
from tests.learner.gateway.ledger_simulation import GROUP_SIZE, Broken, Simulation


def limits(max_staleness: int = 1, window: int = 1, *, greedy: bool = False, adaptive: Adaptive | None = None) -> Limits:
    return Limits(groups_per_step=2, group_size=GROUP_SIZE, max_staleness=max_staleness, window=window, min_usable=2, zero_signal=False, max_consecutive_drops=10_000, max_attempts=4, baselines=frozenset({""} if greedy else ()), adaptive=adaptive)


def payload_of(record: dict[str, Any]) -> bytes:
    """A trajectory that says what the record says."""
    facts, spans, end = record["facts"], [], 0
    for version, count in facts["spans"]:
        spans.append(trajectory_pb2.VersionSpan(version=version, start=end, end=end + count))
        end += count
    reward = trajectory_pb2.Reward(score=trajectory_pb2.Score(value=facts["reward"])) if facts["reward"] is not None else trajectory_pb2.Reward(unscored=trajectory_pb2.Unscored())
    return trajectory_pb2.Trajectory(
        group_id=f"g{record['seq']:08d}", sample_index=record["sample_index"], completion_ids=pack_ids([1] * end), logprobs=pack_floats([-1.0] * end),
        spans=spans, finish_reason=trajectory_pb2.FINISH_REASON_STOP, reward=reward,
    ).SerializeToString()  # fmt: skip


def audited(simulation: Simulation, *, greedy: bool = False) -> Accounting:
    """The life as a journal would hold it: publications say their lineage, submissions have payloads. greedy: as the configuration says."""
    rules = simulation.ledger.limits
    accounting = Accounting(Rules(groups_per_step=rules.groups_per_step, group_size=rules.group_size, max_staleness=rules.max_staleness, greedy=greedy, adaptive=(rules.adaptive.lowest, rules.adaptive.highest) if rules.adaptive else None), Findings(), None)
    lineage = 0
    for number, record in enumerate(simulation.records):
        lineage += record["type"] == "rolled_back"
        extra = {"lineage": lineage, "will_save": False} if record["type"] == "published" else {}
        payload = payload_of(record) if record["type"] == "submitted" else b""
        accounting.follow(Entry(position=(0, number), where=f"record {number}", record={**record, **extra}, payload=payload))
    return accounting


@pytest.mark.parametrize("life", ["steady", "rollbacks", "abandons"])
@pytest.mark.parametrize(("max_staleness", "window"), [(0, 1), (1, 3), (3, 1)])
def test_every_life_of_the_ledger_is_clean_and_the_totals_are_the_same(max_staleness: int, window: int, life: str) -> None:
    for seed in range(6):
        simulation = Simulation(ledger=Ledger(limits(max_staleness, window)), seed=seed, rollbacks=life != "steady", abandons=life == "abandons")
        simulation.run(400)
        accounting, counts = audited(simulation), simulation.ledger.counts()
        assert accounting.findings.lines() == []
        assert (accounting.next_group, accounting.num_trained, dict(accounting.dropped), accounting.num_open) == (counts.leased, counts.trained, counts.dropped, counts.open)


def test_lives_with_greedy_answers_are_clean_and_no_others_are_where_there_should_be_some() -> None:
    for seed in range(6):
        simulation = Simulation(ledger=Ledger(limits(1, 3, greedy=True)), seed=seed, rollbacks=True)
        simulation.run(400)
        assert audited(simulation, greedy=True).findings.lines() == [] and simulation.ledger.counts().trained
        assert {finding.rule for finding in audited(simulation).findings.found} == {SIZES}
    simulation = Simulation(ledger=Ledger(limits()), seed=0)
    simulation.run(100)
    assert {finding.rule for finding in audited(simulation, greedy=True).findings.found} == {SIZES}


MOVING = Adaptive(lowest=1, highest=3, low=0.05, high=0.1)


@pytest.mark.parametrize("life", ["steady", "rollbacks", "abandons"])
def test_lives_whose_bound_moves_are_clean(life: str) -> None:
    for seed in range(6):
        simulation = Simulation(ledger=Ledger(limits(1, 3, adaptive=MOVING)), seed=seed, rollbacks=life != "steady", abandons=life == "abandons")
        simulation.run(400)
        accounting = audited(simulation)
        assert accounting.findings.lines() == [] and accounting.bound == simulation.bound


class Leaps(Ledger):
    """The bound goes to its end at once, and lets too many in."""

    def _next_bound(self, mismatch: float | None) -> dict[str, int]:
        return {"bound": 3 if mismatch is not None and mismatch < 0.05 else 1}


def test_a_bound_that_leaps_is_found_out() -> None:
    simulation = Simulation(ledger=Leaps(limits(1, 3, adaptive=MOVING)), seed=0)
    with suppress(Broken):  # now and then the life itself shows it
        simulation.run(400)
    assert BOUND in {finding.rule for finding in audited(simulation).findings.found}


class WithoutBaseline(Ledger):
    """Takes groups whose greedy answer has no score."""

    def _verdict(self, group: Group, samples: Mapping[int, SampleFacts], *, complete: bool) -> str:
        group.baseline = False
        verdict = super()._verdict(group, {index: facts for index, facts in samples.items() if index < GROUP_SIZE}, complete=complete)
        group.baseline = True
        return verdict


def test_a_trained_group_whose_greedy_answer_has_no_score_is_found_out() -> None:
    simulation = Simulation(ledger=WithoutBaseline(limits(greedy=True)), seed=0)
    with pytest.raises(Broken, match="has no baseline"):
        simulation.run(4000)
    assert {finding.rule for finding in audited(simulation, greedy=True).findings.found} == {BASELINE}


class Unchecked(Ledger):
    """Its own check where the batch is cut is off."""

    def oldest_of(self, seq: int) -> int:
        return 0

    def _check_versions(self, group: Group, spans: tuple[tuple[int, int], ...]) -> None:
        pass

    def cover(self, policy_step: int) -> None:
        """Keeps every version, since too old ones are still asked for."""


class OneMore(Unchecked):
    """One more open group than the bound allows."""

    def room(self) -> int:
        return super().room() + 1 if self.published else 0


def test_a_ledger_that_opens_one_group_too_many_is_found_out() -> None:
    """The known mistake of docs/staleness.md that breaks the bound by one."""
    broken = 0
    for seed in range(20):
        simulation = Simulation(ledger=OneMore(limits()), seed=seed)
        try:
            simulation.run(400)
        except Broken:
            broken += 1
            assert any(finding.rule == STALE and "2 steps old, max_staleness is 1" in finding.what for finding in audited(simulation).findings.found)
    assert broken, "the search met the mistake"


def test_actors_that_do_not_wait_for_the_least_version_are_found_out() -> None:
    found = 0
    for seed in range(20):
        simulation = Simulation(ledger=Unchecked(limits(0)), seed=seed, honest_actors=False)
        try:
            simulation.run(200)
        except Broken:
            found += any(finding.rule == STALE for finding in audited(simulation).findings.found)
    assert found


def test_the_strands_of_a_payload_are_counted_as_one_sample() -> None:
    findings = Findings()
    more = trajectory_pb2.Strand(completion_ids=pack_ids([1, 2]), logprobs=pack_floats([-1, -1]), loss_mask=pack_mask([0, 1]), spans=[trajectory_pb2.VersionSpan(version=8, start=0, end=2)])
    score = trajectory_pb2.Reward(score=trajectory_pb2.Score(value=1.0))
    whole = trajectory_pb2.Trajectory(
        group_id="g00000001", sample_index=0, completion_ids=pack_ids([3]), logprobs=pack_floats([-1]), spans=[trajectory_pb2.VersionSpan(version=7, start=0, end=1)], reward=score,
        finish_reason=trajectory_pb2.FINISH_REASON_STOP, more_strands=[more], prompt_ids=pack_ids([4]), own_prompt=True,
    )  # fmt: skip
    found = check(whole.SerializeToString(), (1, 0), None, b"other", "record 1", findings)
    assert found is not None and found.usable and found.tokens == ((7, 1), (8, 1)) and not findings.found
    del more.spans[:]
    whole.more_strands[0].CopyFrom(more)
    check(whole.SerializeToString(), (1, 0), None, b"other", "record 1", findings)
    assert "strand 1: 2 tokens" in str(findings.found)
