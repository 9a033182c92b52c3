"""Every state with every event: the table is written out by hand."""

from __future__ import annotations

import itertools

import pytest

from rollout_server.weights.transaction import Action, ActionKind, Event, EventKind, Phase, State, advance

# Epoch 4 of version 9 is run by a replica that has 8 loaded; FETCHING has no epoch.
STATES = {
    Phase.IDLE: State(loaded=8, newest=9),
    Phase.PREPARED: State(phase=Phase.PREPARED, epoch=4, version=9, loaded=8, newest=9),
    Phase.RECEIVING: State(phase=Phase.RECEIVING, epoch=4, version=9, loaded=8, newest=9),
    Phase.HELD: State(phase=Phase.HELD, epoch=4, version=9, loaded=8, newest=9, hold=True),
    Phase.FETCHING: State(phase=Phase.FETCHING, version=9, loaded=8, newest=9),
    Phase.COMMITTING: State(phase=Phase.COMMITTING, epoch=4, version=9, loaded=8, newest=9),
}
EVENTS = {
    "prepare": Event(kind=EventKind.PREPARE, epoch=5, version=9),
    "begin": Event(kind=EventKind.BEGIN, epoch=4, version=9),
    "commit": Event(kind=EventKind.COMMIT, epoch=4),
    "abort": Event(kind=EventKind.ABORT, epoch=4),
    "detached": Event(kind=EventKind.DETACHED),
    "published": Event(kind=EventKind.PUBLISHED, version=10),
    "behind": Event(kind=EventKind.BEHIND),
    "received": Event(kind=EventKind.RECEIVED, version=9),
    "fetched": Event(kind=EventKind.FETCHED, version=9),
    "failed": Event(kind=EventKind.FAILED, version=9, detail="x"),
    "committed": Event(kind=EventKind.COMMITTED, version=9),
    "refused": Event(kind=EventKind.REFUSED, version=9, detail="x"),
    "broken": Event(kind=EventKind.BROKEN, version=9, detail="x"),
}
# (phase, event): (phase after, names of actions). What is not listed changes nothing.
TABLE: dict[tuple[str, str], tuple[str, str]] = {
    ("IDLE", "prepare"): ("PREPARED", "READY"),
    ("PREPARED", "prepare"): ("PREPARED", "READY"),
    ("RECEIVING", "prepare"): ("PREPARED", "DISCARD READY"),
    ("HELD", "prepare"): ("HELD", "DECLINED"),
    ("FETCHING", "prepare"): ("FETCHING", "DECLINED"),
    ("COMMITTING", "prepare"): ("COMMITTING", "DECLINED"),
    ("IDLE", "begin"): ("IDLE", "REPORT_FAILED"),
    ("PREPARED", "begin"): ("RECEIVING", "RECEIVE"),
    ("RECEIVING", "begin"): ("RECEIVING", "REPORT_FAILED"),
    ("HELD", "begin"): ("HELD", "REPORT_FAILED"),
    ("FETCHING", "begin"): ("FETCHING", "REPORT_FAILED"),
    ("HELD", "commit"): ("COMMITTING", "COMMIT"),
    ("HELD", "abort"): ("IDLE", "DISCARD"),
    ("HELD", "detached"): ("IDLE", "DISCARD"),
    ("HELD", "behind"): ("COMMITTING", "COMMIT"),
    ("COMMITTING", "begin"): ("COMMITTING", "REPORT_FAILED"),
    ("PREPARED", "abort"): ("IDLE", ""),
    ("RECEIVING", "abort"): ("IDLE", "DISCARD"),
    ("PREPARED", "detached"): ("IDLE", ""),
    ("RECEIVING", "detached"): ("IDLE", "DISCARD"),
    ("COMMITTING", "detached"): ("COMMITTING", ""),
    ("IDLE", "behind"): ("FETCHING", "FETCH"),
    ("PREPARED", "behind"): ("FETCHING", "FETCH"),
    ("RECEIVING", "received"): ("COMMITTING", "REPORT_RECEIVED COMMIT"),
    ("FETCHING", "fetched"): ("COMMITTING", "COMMIT"),
    ("RECEIVING", "failed"): ("IDLE", "DISCARD REPORT_FAILED"),
    ("FETCHING", "failed"): ("IDLE", "DISCARD REPORT_FAILED"),
    ("COMMITTING", "committed"): ("IDLE", "REPORT_LOADED"),
    ("COMMITTING", "refused"): ("IDLE", "DISCARD REPORT_FAILED"),
    ("COMMITTING", "broken"): ("IDLE", "DISCARD REPORT_FAILED"),
}


@pytest.mark.parametrize(("phase", "name"), list(itertools.product([phase.name for phase in Phase], EVENTS)))
def test_each_event_in_each_phase_leads_where_the_table_says(phase: str, name: str) -> None:
    state = STATES[Phase[phase]]
    after, actions = advance(state, EVENTS[name])
    expected_phase, expected_actions = TABLE.get((phase, name), (phase, ""))
    assert after.phase.name == expected_phase
    assert " ".join(action.kind.name for action in actions) == expected_actions


@pytest.mark.parametrize(("phase", "name"), list(itertools.product([phase.name for phase in Phase], EVENTS)))
def test_only_a_commit_changes_what_is_loaded_and_only_a_broken_one_makes_it_stale(phase: str, name: str) -> None:
    after, _ = advance(STATES[Phase[phase]], EVENTS[name])
    assert after.loaded == (9 if (phase, name) == ("COMMITTING", "committed") else 8)
    assert after.stale == ((phase, name) == ("COMMITTING", "broken"))
    assert after.newest == (10 if name == "published" else 9)


def test_a_stale_replica_takes_even_the_version_it_had_loaded() -> None:
    stale = State(loaded=9, newest=9, stale=True)
    after, actions = advance(stale, Event(kind=EventKind.PREPARE, epoch=6, version=9))
    assert after.phase is Phase.PREPARED and actions[0].kind is ActionKind.READY
    fetching, actions = advance(stale, Event(kind=EventKind.BEHIND))
    assert actions == (Action(kind=ActionKind.FETCH, version=9),)
    committing, _ = advance(fetching, Event(kind=EventKind.FETCHED, version=9))
    done, _ = advance(committing, Event(kind=EventKind.COMMITTED, version=9))
    assert not done.stale and not done.behind


def test_a_replica_that_has_the_version_declines_and_one_that_fetches_an_older_one_turns_to_the_push() -> None:
    _, actions = advance(State(loaded=9, newest=9), Event(kind=EventKind.PREPARE, epoch=6, version=9))
    assert [a.kind for a in actions] == [ActionKind.DECLINED] and actions[0].detail == "version 9 is loaded"
    after, actions = advance(STATES[Phase.FETCHING], Event(kind=EventKind.PREPARE, epoch=6, version=10))
    assert [a.kind for a in actions] == [ActionKind.DISCARD, ActionKind.READY]
    assert (after.phase, after.epoch, after.version, after.newest) == (Phase.PREPARED, 6, 10, 10)


def test_begin_of_another_epoch_or_version_is_answered_with_a_failure_that_says_both() -> None:  # faults.md 24
    _, actions = advance(STATES[Phase.PREPARED], Event(kind=EventKind.BEGIN, epoch=5, version=9))
    assert actions[0].kind is ActionKind.REPORT_FAILED
    assert actions[0].detail == "epoch 5 was not prepared: the replica is PREPARED with epoch 4, version 9"


def test_abort_of_another_epoch_changes_nothing() -> None:
    assert advance(STATES[Phase.RECEIVING], Event(kind=EventKind.ABORT, epoch=3)) == (STATES[Phase.RECEIVING], ())


def test_a_fetch_may_bring_a_newer_version_than_was_asked_for() -> None:
    after, actions = advance(STATES[Phase.FETCHING], Event(kind=EventKind.FETCHED, version=11))
    assert actions == (Action(kind=ActionKind.COMMIT, version=11),) and after.newest == 11
    done, _ = advance(after, Event(kind=EventKind.COMMITTED, version=11))
    assert done.loaded == 11
