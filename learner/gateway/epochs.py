"""One weight-update epoch as a pure state machine: (epoch, event) → (epoch, actions). updates.py drives it.

    GATHERING ──all ranks began──▶ PREPARING ──all answered, or prepare_s──▶ TRANSFERRING ──all ended, or deadline──▶ OVER
                                      └── nobody READY ──────────────────────────────────────────────────────────────▶ OVER

Membership is settled before a byte moves. A member that left or was not heard of is blamed for the epoch; where all
were heard, those that failed are. A dead member fails the others' collectives too, so those are not blamed beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

Member = tuple[str, int]  # replica_id, incarnation


class State(Enum):
    GATHERING = "gathering"
    PREPARING = "preparing"
    TRANSFERRING = "transferring"
    OVER = "over"


class Phase(Enum):
    READY = "ready"
    DECLINED = "declined"
    RECEIVED = "received"
    LOADED = "loaded"
    FAILED = "failed"
    LOST = "lost"  # its stream ended, or it fell silent
    UNHEARD = "unheard"  # it attends and said nothing


_HAS_IT = frozenset({Phase.RECEIVED, Phase.LOADED})
_TERMINAL = _HAS_IT | {Phase.FAILED, Phase.LOST}


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """What is known of one epoch. Example: `Epoch(number=8, version=3, num_ranks=2)`."""

    number: int  # never used twice
    version: int
    num_ranks: int
    state: State = State.GATHERING
    began: frozenset[int] = frozenset()  # ranks
    asked: tuple[Member, ...] = ()  # replicas that were asked to prepare, in order
    answers: dict[Member, bool] = field(default_factory=dict)  # READY or not
    members: tuple[Member, ...] = ()  # in order of receiver rank
    phases: dict[Member, Phase] = field(default_factory=dict)  # of members
    details: dict[Member, str] = field(default_factory=dict)
    ranks_ok: dict[int, bool] = field(default_factory=dict)  # of ranks that ended


@dataclass(frozen=True, slots=True)
class Began:
    rank: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """Answer to Choose: who may take part."""

    candidates: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Reported:
    member: Member
    phase: Phase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PrepareOver:
    """prepare_s has passed."""


@dataclass(frozen=True, slots=True)
class Ended:
    rank: int
    ok: bool


@dataclass(frozen=True, slots=True)
class DeadlineOver:
    """The epoch's deadline has passed."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A new trainer incarnation, or a newer epoch, took its place."""


Event = Began | Chosen | Reported | PrepareOver | Ended | DeadlineOver | Abandoned


@dataclass(frozen=True, slots=True)
class Choose:
    """Say who may take part (answer with Chosen)."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Send PrepareUpdate and start the clock of prepare_s."""

    asked: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Answer BeginUpdate; BeginTransfer to members, AbortUpdate to the others that were asked."""

    members: tuple[Member, ...]
    left_out: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Hurry:
    """A rank failed: members find out within one collective's timeout, so wait no longer than that."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Answer EndUpdate; AbortUpdate to `unfinished`."""

    outcomes: tuple[tuple[Member, Phase, str], ...]
    retry: bool
    clean: bool  # every rank and member ended well: the communicators are still right
    blamed: tuple[Member, ...]
    unfinished: tuple[Member, ...]


Action = Choose | Prepare | Settle | Hurry | Finish


def step(epoch: Epoch, event: Event) -> tuple[Epoch, tuple[Action, ...]]:
    """The next state and what to do. Events that do not fit the state change nothing."""
    if epoch.state is State.OVER:
        return epoch, ()
    if isinstance(event, Abandoned):
        return _abandon(epoch)
    return _STEPS[epoch.state](epoch, event)


def _gathering(epoch: Epoch, event: Event) -> tuple[Epoch, tuple[Action, ...]]:
    if isinstance(event, Began):
        epoch = replace(epoch, began=epoch.began | {event.rank})
        if len(epoch.began) == epoch.num_ranks:
            return replace(epoch, state=State.PREPARING), (Choose(),)
    if isinstance(event, DeadlineOver):
        return replace(epoch, state=State.OVER), (Settle((), ()),)
    return epoch, ()


def _preparing(epoch: Epoch, event: Event) -> tuple[Epoch, tuple[Action, ...]]:
    if isinstance(event, Chosen):
        epoch = replace(epoch, asked=event.candidates)
        return (epoch, (Prepare(event.candidates),)) if event.candidates else _settle(epoch)
    if isinstance(event, PrepareOver | DeadlineOver):
        return _settle(epoch)
    if isinstance(event, Reported) and event.member in epoch.asked:
        epoch = replace(
            epoch,
            answers={**epoch.answers, event.member: event.phase is Phase.READY},
            details={**epoch.details, event.member: event.detail},
        )
        if len(epoch.answers) == len(epoch.asked):
            return _settle(epoch)
    return epoch, ()


def _settle(epoch: Epoch) -> tuple[Epoch, tuple[Action, ...]]:
    members = tuple(member for member in epoch.asked if epoch.answers.get(member))
    left_out = tuple(member for member in epoch.asked if member not in members)
    state = State.TRANSFERRING if members else State.OVER
    return replace(epoch, state=state, members=members), (Settle(members, left_out),)


def _transferring(epoch: Epoch, event: Event) -> tuple[Epoch, tuple[Action, ...]]:
    if isinstance(event, DeadlineOver):
        return _finish(epoch)
    actions: tuple[Action, ...] = ()
    if isinstance(event, Ended):
        if not event.ok and all(epoch.ranks_ok.values()):
            actions = (Hurry(),)
        epoch = replace(epoch, ranks_ok={**epoch.ranks_ok, event.rank: event.ok})
    elif isinstance(event, Reported) and event.member in epoch.members:
        epoch = _note(epoch, event)
    if len(epoch.ranks_ok) == epoch.num_ranks and all(epoch.phases.get(m) in _TERMINAL for m in epoch.members):
        return _finish(epoch)
    return epoch, actions


def _note(epoch: Epoch, event: Reported) -> Epoch:
    """The member's phase. One that has the version keeps it when its stream is lost afterwards; FAILED after RECEIVED counts."""
    before = epoch.phases.get(event.member)
    phase = Phase.FAILED if event.phase is Phase.DECLINED else event.phase
    if phase is Phase.READY or before is Phase.LOST or (phase is Phase.LOST and before in _HAS_IT):
        return epoch
    if before is Phase.LOADED or (before is Phase.FAILED and phase is not Phase.LOST):
        return epoch
    return replace(
        epoch,
        phases={**epoch.phases, event.member: phase},
        details={**epoch.details, event.member: event.detail},
    )


def _finish(epoch: Epoch, *, abandoned: bool = False) -> tuple[Epoch, tuple[Action, ...]]:
    phases = {member: epoch.phases.get(member, Phase.UNHEARD) for member in epoch.members}
    lacking = [member for member in epoch.members if phases[member] not in _HAS_IT]
    blamed = () if abandoned else _blamed(phases)
    remaining = [member for member in lacking if member not in blamed]
    ranks_ok = len(epoch.ranks_ok) == epoch.num_ranks and all(epoch.ranks_ok.values())
    finish = Finish(
        outcomes=tuple((member, phases[member], epoch.details.get(member, "")) for member in epoch.members),
        retry=not abandoned and 0 < len(remaining) < len(epoch.members),
        clean=ranks_ok and not lacking,
        blamed=blamed,
        unfinished=tuple(member for member in lacking if phases[member] is Phase.UNHEARD),
    )
    return replace(epoch, state=State.OVER), (finish,)


def _blamed(phases: dict[Member, Phase]) -> tuple[Member, ...]:
    gone = tuple(member for member, phase in phases.items() if phase in (Phase.LOST, Phase.UNHEARD))
    return gone or tuple(member for member, phase in phases.items() if phase is Phase.FAILED)


def _abandon(epoch: Epoch) -> tuple[Epoch, tuple[Action, ...]]:
    if epoch.state is State.TRANSFERRING:
        return _finish(epoch, abandoned=True)
    return replace(epoch, state=State.OVER), (Settle((), epoch.asked),)


_STEPS = {State.GATHERING: _gathering, State.PREPARING: _preparing, State.TRANSFERRING: _transferring}
