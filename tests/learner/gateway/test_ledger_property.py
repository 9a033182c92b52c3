"""Searches for a life in which the ledger breaks a promise; and shows that the search would find it, by planting each known mistake."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgpack
import pytest

from learner.gateway import ledger as ledger_module
from learner.gateway.groups import Group
from learner.gateway.ledger import Ledger, Limits
from learner.gateway.parts import Part, digest_of
from learner.gateway.terms import Adaptive, Reported
from learner.gateway.versions import StalenessBroken
from tests.learner.gateway.ledger_simulation import GROUP_SIZE, Broken, Simulation

# (S, W, P); S = 0 allows only W = 1.
SHAPES = [(0, 1, 2), (1, 1, 2), (1, 3, 2), (3, 1, 2), (3, 3, 2), (1, 3, 3)]


def limits(max_staleness: int, window: int, groups_per_step: int, *, baselines: frozenset[str] = frozenset(), adaptive: Adaptive | None = None) -> Limits:
    return Limits(
        groups_per_step=groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=max_staleness,
        window=window,
        min_usable=2,
        zero_signal=False,
        max_consecutive_drops=10_000,
        max_attempts=4,
        baselines=baselines,
        adaptive=adaptive,
    )


@pytest.mark.parametrize(("max_staleness", "window", "groups_per_step"), SHAPES)
@pytest.mark.parametrize("life", ["steady", "rollbacks", "abandons"])
def test_no_life_breaks_the_bound_the_balance_or_progress(max_staleness: int, window: int, groups_per_step: int, life: str) -> None:
    ages: set[int] = set()
    for seed in range(30):
        rules = limits(max_staleness, window, groups_per_step)
        simulation = Simulation(ledger=Ledger(rules), seed=seed, rollbacks=life != "steady", abandons=life == "abandons")
        simulation.run(1000)
        ages |= set(simulation.ages)
    synchronous = rules.max_open(max_staleness) == groups_per_step and life == "steady"
    assert max(ages) == (0 if synchronous else max_staleness)  # the bound is reached, so the search would see it passed


# (lowest, highest, W, P): W at most lowest * P + 1
MOVING = [(0, 3, 1, 2), (1, 3, 3, 2), (1, 4, 1, 3)]


def moving(lowest: int, highest: int, window: int, groups_per_step: int) -> Limits:
    return limits(lowest + 1, window, groups_per_step, adaptive=Adaptive(lowest=lowest, highest=highest, low=0.05, high=0.1))


@pytest.mark.parametrize("shape", MOVING)
@pytest.mark.parametrize("life", ["steady", "rollbacks", "abandons"])
def test_no_life_breaks_a_bound_that_moves_with_the_mismatch(shape: tuple[int, int, int, int], life: str) -> None:
    ages, seen = set(), set()
    for seed in range(20):
        simulation = Simulation(ledger=Ledger(moving(*shape)), seed=seed, rollbacks=life != "steady", abandons=life == "abandons")
        simulation.run(1000)
        ages |= set(simulation.ages)
        seen |= set(simulation.bound_of.values())
        assert simulation.ledger.bound == simulation.bound
    assert seen == set(range(shape[0], shape[1] + 1)) and max(ages) == shape[1]


def test_replaying_the_records_of_a_moving_bound_gives_the_same_state() -> None:
    for seed in range(10):
        simulation = Simulation(ledger=Ledger(moving(1, 3, 3, 2)), seed=seed, rollbacks=True, abandons=True)
        simulation.run(300)
        again = Ledger(simulation.ledger.limits)
        for record in simulation.records:
            again.apply(msgpack.unpackb(msgpack.packb(record)))
        assert again.state() == simulation.ledger.state()
        assert Ledger.from_state(again.limits, msgpack.unpackb(msgpack.packb(again.state()))).bound == simulation.bound


def test_no_life_with_greedy_answers_trains_on_one_or_without_its_reward() -> None:
    num_dropped = 0
    for seed in range(20):
        rules = limits(1, 3, 2, baselines=frozenset({""}))
        simulation = Simulation(ledger=Ledger(rules), seed=seed, rollbacks=True, abandons=seed % 2 == 0)
        simulation.run(600)
        num_dropped += simulation.ledger.counts().dropped.get("no_baseline", 0)
    assert num_dropped > 0


def test_with_bound_zero_every_token_is_drawn_by_the_policy_it_trains() -> None:
    for seed in range(20):
        simulation = Simulation(ledger=Ledger(limits(0, 1, 3)), seed=seed)
        simulation.run(300)
        assert set(simulation.ages) == {0}


def test_unfinished_samples_are_drawn_on_by_others_and_nothing_that_was_promised_breaks() -> None:
    num_continued = 0
    for seed in range(20):
        simulation = Simulation(ledger=Ledger(limits(1, 3, 2)), seed=seed, rollbacks=True, abandons=seed % 2 == 0, reports=True)
        simulation.run(800)
        num_continued += simulation.num_continued
        again = Ledger(simulation.ledger.limits)
        for record in simulation.records:
            again.apply(msgpack.unpackb(msgpack.packb(record)))
        assert again.state() == simulation.ledger.state()
    assert num_continued > 50


class TakesReportsFromAnybody(Ledger):
    """Whoever drew as many tokens may add to a sample, whatever its lease and its tokens."""

    def report(self, group_id: str, sample_index: int, *, lease_id: str, part: Part, digest_before: int) -> Reported:
        group = self.group(group_id)
        known = group.parts.get(sample_index) if group else None
        lease = group.lease.lease_id if group and group.lease else lease_id
        return super().report(group_id, sample_index, lease_id=lease, part=part, digest_before=digest_of(known.ids if known else b""))


def test_groups_with_samples_to_spare_keep_every_promise() -> None:
    for seed in range(20):
        rules = replace(limits(1, 3, 2), oversample=1)
        simulation = Simulation(ledger=Ledger(rules), seed=seed, rollbacks=True, abandons=seed % 2 == 0, reports=True)
        simulation.run(600)
        assert all(len(group.samples) <= group.size == GROUP_SIZE for group in simulation.ledger.account.groups.values())
        assert any(GROUP_SIZE in group.samples for group in simulation.ledger.account.groups.values()) or seed  # the spare one is at times among the first


def search_with_reports(ledger: type[Ledger]) -> None:
    for seed in range(20):
        Simulation(ledger=ledger(limits(1, 3, 2)), seed=seed, reports=True).run(800)


def test_a_ledger_that_takes_reports_from_anybody_is_caught() -> None:
    with pytest.raises((Broken, ValueError)):
        search_with_reports(TakesReportsFromAnybody)


@pytest.mark.parametrize("rollbacks", [False, True])
def test_replaying_the_records_gives_exactly_the_same_state(rollbacks: bool) -> None:
    for seed in range(20):
        simulation = Simulation(ledger=Ledger(limits(1, 3, 2)), seed=seed, rollbacks=rollbacks, abandons=rollbacks)
        simulation.run(200)
        stored = [msgpack.unpackb(msgpack.packb(record)) for record in simulation.records]
        middle = len(stored) // 2
        first = Ledger(simulation.ledger.limits)
        for record in stored[:middle]:
            first.apply(record)
        second = Ledger.from_state(simulation.ledger.limits, msgpack.unpackb(msgpack.packb(first.state())))
        for record in stored[middle:]:
            second.apply(record)
        assert second.state() == simulation.ledger.state()


# The known mistakes. Each is planted in a ledger whose own check at the cut is off, so that the search alone must catch it.


class Unchecked(Ledger):
    def oldest_of(self, seq: int) -> int:
        return 0

    def _check_versions(self, group: Group, spans: tuple[tuple[int, int], ...]) -> None:
        pass

    def cover(self, policy_step: int) -> None:
        """Keeps every version, since too old ones are still asked for."""


class TrainsTheBaseline(Ledger):
    """The greedy answer is a sample like the others where tokens are counted."""

    def oldest_of(self, seq: int) -> int:
        self.account.groups[seq].baseline = False
        return super().oldest_of(seq)


class LowersForOpenGroups(Ledger):
    """Groups that are open already are held to the present bound."""

    def bound_of(self, seq: int) -> int:
        return min(self.bound, super().bound_of(seq))


class RaisesBeyond(Unchecked):
    """The highest bound is no limit."""

    def _next_bound(self, mismatch: float | None) -> dict[str, int]:
        assert self.limits.adaptive is not None
        self.limits = replace(self.limits, adaptive=replace(self.limits.adaptive, highest=99))
        return super()._next_bound(mismatch)


class KeepsTheBoundInARollback(Unchecked):
    """What was measured past the cut still counts."""

    def rollback(self, policy_step: int, *, replay: bool = True) -> dict[str, object] | None:
        bound = self.bound
        record = super().rollback(policy_step, replay=replay)
        self.account.bounds[policy_step] = bound
        return record


class LeasedAgainAtTheTail(Unchecked):
    """A group that is leased again goes behind all others, its finished samples with it."""

    def lease_again(self, *, holder: str, lease_id: str, lapse_at: float) -> tuple[Group, dict[str, object]]:
        group, record = super().lease_again(holder=holder, lease_id=lease_id, lapse_at=lapse_at)
        account = self.account
        del account.groups[group.seq]
        group.seq = account.next_seq
        account.groups[group.seq] = group
        account.next_seq += 1
        account.dropped["moved"] = account.dropped.get("moved", 0) + 1
        return group, record


class OneMore(Limits):
    """(S + 1) * P - (W - 1) + 1."""

    def max_open(self, bound: int) -> int:
        return super().max_open(bound) + 1


def window_over_the_first_of_the_queue(open_groups: Iterable[tuple[int, bool]], *, num_groups: int, window: int) -> list[int]:
    """Any complete group among the first W that are still outside."""
    outside = sorted(open_groups)
    entered: list[int] = []
    while len(entered) < num_groups:
        ready = [pair for pair in outside[:window] if pair[1]]
        if not ready:
            break
        outside.remove(ready[0])
        entered.append(ready[0][0])
    return entered


def anchored_window(open_groups: Iterable[tuple[int, bool]], *, num_groups: int, window: int) -> list[int]:
    """All P at once, all from the window as it lies before the first of them enters."""
    outside = sorted(open_groups)
    ready = [seq for seq, complete in outside if complete and seq < outside[0][0] + window]
    return ready[:num_groups]


def search(ledger_class: type[Ledger], rules: Limits, *, honest_actors: bool = True, rollbacks: bool = False) -> str:
    """What broke, or an empty string."""
    for seed in range(300):
        simulation = Simulation(ledger=ledger_class(rules), seed=seed, honest_actors=honest_actors, rollbacks=rollbacks)
        try:
            simulation.run(300)
        except (Broken, StalenessBroken) as broken:
            return str(broken)
    return ""


@pytest.mark.parametrize(("max_staleness", "window", "groups_per_step"), [(1, 3, 3), (3, 3, 2)])
def test_the_search_finds_nothing_when_only_the_check_is_off(max_staleness: int, window: int, groups_per_step: int) -> None:
    for seed in range(20):
        Simulation(ledger=Unchecked(limits(max_staleness, window, groups_per_step)), seed=seed).run(300)


def test_the_search_catches_a_window_over_the_first_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "choose", window_over_the_first_of_the_queue)
    assert "staleness" in search(Unchecked, limits(1, 3, 3))


def test_the_search_catches_a_release_at_the_tail() -> None:
    assert "staleness" in search(LeasedAgainAtTheTail, limits(1, 1, 2))


def test_the_search_catches_an_anchored_window_with_an_atomic_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "choose", anchored_window)
    assert "deadlock" in search(Unchecked, limits(3, 3, 4))


def test_the_search_catches_a_lowered_bound_that_open_groups_are_held_to() -> None:
    assert "more than max_staleness=" in search(LowersForOpenGroups, moving(0, 3, 1, 2))


def test_the_search_catches_a_bound_raised_beyond_the_highest() -> None:
    assert "staleness" in search(RaisesBeyond, moving(0, 2, 1, 2))


def test_the_search_catches_a_bound_that_does_not_go_back_with_a_rollback() -> None:
    assert "staleness" in search(KeepsTheBoundInARollback, moving(0, 4, 1, 2), rollbacks=True)


def test_the_search_catches_a_baseline_among_the_trained_tokens() -> None:
    assert "tokens of step" in search(TrainsTheBaseline, limits(1, 1, 2, baselines=frozenset({""})))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_search_catches_actors_that_do_not_wait_for_the_least_version(max_staleness: int) -> None:
    assert f"staleness {max_staleness + 1}" in search(Unchecked, limits(max_staleness, 1, 2), honest_actors=False)


@pytest.mark.parametrize(("max_staleness", "window", "groups_per_step"), SHAPES)
def test_the_search_catches_one_open_group_too_many(max_staleness: int, window: int, groups_per_step: int) -> None:
    right = limits(max_staleness, window, groups_per_step)
    wrong = OneMore(**{name: getattr(right, name) for name in Limits.__slots__})
    assert f"staleness {max_staleness + 1}" in search(Unchecked, wrong)


def test_the_ledger_itself_raises_where_a_batch_is_cut() -> None:
    wrong = OneMore(**{name: getattr(limits(0, 1, 2), name) for name in Limits.__slots__})
    assert "more than max_staleness=0" in search(Ledger, wrong)
