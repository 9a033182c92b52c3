"""The epoch machine: what each event does in each state."""

from __future__ import annotations

import pytest

from learner.gateway.epochs import (
    Abandoned,
    Action,
    Began,
    Choose,
    Chosen,
    DeadlineOver,
    Ended,
    Epoch,
    Event,
    Finish,
    Hurry,
    Member,
    Phase,
    Prepare,
    PrepareOver,
    Reported,
    Settle,
    State,
    step,
)  # fmt: skip

A, B = ("a", 1), ("b", 1)


def run(*events: Event, num_ranks: int = 1) -> tuple[Epoch, list[Action]]:
    epoch = Epoch(number=1, version=3, num_ranks=num_ranks)
    actions: list[Action] = []
    for event in events:
        epoch, new = step(epoch, event)
        actions += new
    return epoch, actions


def transferring(*events: Event) -> tuple[Epoch, list[Action]]:
    """One rank, members a and b settled; then `events`."""
    return run(Began(0), Chosen((A, B)), Reported(A, Phase.READY), Reported(B, Phase.READY), *events)


def finish(actions: list[Action]) -> Finish:
    return next(action for action in actions if isinstance(action, Finish))


TABLE: list[tuple[str, tuple[Event, ...], State, Action | None]] = [
    ("the first of two ranks waits", (Began(0),), State.GATHERING, None),
    ("the last rank asks for candidates", (Began(0), Began(1)), State.PREPARING, Choose()),
    ("a rank that repeats itself counts once", (Began(0), Began(0)), State.GATHERING, None),
    ("candidates are asked", (Began(0), Began(1), Chosen((A,))), State.PREPARING, Prepare((A,))),
    ("without candidates the epoch is over", (Began(0), Began(1), Chosen(())), State.OVER, Settle((), ())),
    ("all answers settle it", (Began(0), Began(1), Chosen((A,)), Reported(A, Phase.READY)), State.TRANSFERRING, Settle((A,), ())),
    ("one that declines is left out", (Began(0), Began(1), Chosen((A, B)), Reported(A, Phase.DECLINED), Reported(B, Phase.READY)), State.TRANSFERRING, Settle((B,), (A,))),
    ("one that is lost is left out", (Began(0), Began(1), Chosen((A, B)), Reported(B, Phase.READY), Reported(A, Phase.LOST)), State.TRANSFERRING, Settle((B,), (A,))),
    ("a silent one is left out after prepare_s", (Began(0), Began(1), Chosen((A, B)), Reported(A, Phase.READY), PrepareOver()), State.TRANSFERRING, Settle((A,), (B,))),
    ("nobody ready ends it", (Began(0), Began(1), Chosen((A,)), PrepareOver()), State.OVER, Settle((), (A,))),
    ("a stranger's answer changes nothing", (Began(0), Began(1), Chosen((A,)), Reported(B, Phase.READY)), State.PREPARING, Prepare((A,))),
    ("ranks that never all come end it", (Began(0), DeadlineOver()), State.OVER, Settle((), ())),
    ("a new trainer ends it while replicas prepare", (Began(0), Began(1), Chosen((A,)), Abandoned()), State.OVER, Settle((), (A,))),
]


@pytest.mark.parametrize(("events", "state", "last"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_membership_is_settled(events: tuple[Event, ...], state: State, last: Action | None) -> None:
    epoch, actions = run(*events, num_ranks=2)
    assert epoch.state is state
    assert (actions[-1] if actions else None) == last


GOOD = (Ended(0, True),)
OUTCOMES: list[tuple[str, tuple[Event, ...], tuple[Phase, Phase], bool, bool, tuple[Member, ...], tuple[Member, ...]]] = [
    # events, phases of a and b, retry, clean, blamed, unfinished
    ("all received", (Reported(A, Phase.RECEIVED), Reported(B, Phase.LOADED), *GOOD), (Phase.RECEIVED, Phase.LOADED), False, True, (), ()),
    ("one failed: it fetches", (Reported(A, Phase.RECEIVED), Reported(B, Phase.FAILED), *GOOD), (Phase.RECEIVED, Phase.FAILED), False, False, (B,), ()),
    ("a failure after receipt counts", (Reported(A, Phase.RECEIVED), Reported(B, Phase.RECEIVED), Reported(B, Phase.FAILED), *GOOD), (Phase.RECEIVED, Phase.FAILED), False, False, (B,), ()),
    ("one died and took the other along: only the dead one is blamed", (Reported(B, Phase.LOST), Reported(A, Phase.FAILED), Ended(0, False)), (Phase.FAILED, Phase.LOST), True, False, (B,), ()),
    ("one is silent until the deadline", (Reported(A, Phase.FAILED), Ended(0, False), DeadlineOver()), (Phase.FAILED, Phase.UNHEARD), True, False, (B,), (B,)),
    ("both failed: both fetch", (Reported(A, Phase.FAILED), Reported(B, Phase.FAILED), Ended(0, False)), (Phase.FAILED, Phase.FAILED), False, False, (A, B), ()),
    ("a member that leaves with the version has it", (Reported(A, Phase.LOADED), Reported(A, Phase.LOST), Reported(B, Phase.LOADED), *GOOD), (Phase.LOADED, Phase.LOADED), False, True, (), ()),
    ("a rank that failed spoils the group", (Reported(A, Phase.RECEIVED), Reported(B, Phase.RECEIVED), Ended(0, False)), (Phase.RECEIVED, Phase.RECEIVED), False, False, (), ()),
    ("a rank that never ends", (Reported(A, Phase.RECEIVED), Reported(B, Phase.RECEIVED), DeadlineOver()), (Phase.RECEIVED, Phase.RECEIVED), False, False, (), ()),
    ("a new trainer blames nobody", (Reported(A, Phase.RECEIVED), Abandoned()), (Phase.RECEIVED, Phase.UNHEARD), False, False, (), (B,)),
]


@pytest.mark.parametrize("row", OUTCOMES, ids=[row[0] for row in OUTCOMES])
def test_outcome(row: tuple[str, tuple[Event, ...], tuple[Phase, Phase], bool, bool, tuple[Member, ...], tuple[Member, ...]]) -> None:
    _, events, phases, retry, clean, blamed, unfinished = row
    epoch, actions = transferring(*events)
    end = finish(actions)
    assert epoch.state is State.OVER
    assert tuple(phase for _, phase, _ in end.outcomes) == phases
    assert (end.retry, end.clean, end.blamed, end.unfinished) == (retry, clean, blamed, unfinished)


def test_the_end_waits_for_members_even_when_ranks_are_done() -> None:
    epoch, _ = transferring(*GOOD, Reported(A, Phase.RECEIVED))
    assert epoch.state is State.TRANSFERRING


def test_the_first_failing_rank_shortens_the_wait_once() -> None:
    _, actions = run(Began(0), Began(1), Chosen((A,)), Reported(A, Phase.READY), Ended(0, False), Ended(1, False), num_ranks=2)
    assert actions.count(Hurry()) == 1


def test_nothing_moves_an_epoch_that_is_over() -> None:
    epoch, _ = transferring(DeadlineOver())
    assert step(epoch, Reported(A, Phase.RECEIVED)) == (epoch, ())
