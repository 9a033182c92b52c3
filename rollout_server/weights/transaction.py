"""One replica's part in weight updates, as a pure state machine: (state, event) to (state, actions).

    IDLE --prepare--> PREPARED --begin--> RECEIVING --received--> COMMITTING --committed--> IDLE (new version)
      |                                       | failed/abort: discard, old version serves
      |                                       +--received, to be held--> HELD --commit--> COMMITTING
      +--behind--> FETCHING --fetched--> COMMITTING

`stale` is a flag beside the phase: a commit failed after weights were touched; nothing is served until a commit succeeds.
Every event is legal in every state (orders come from another machine, and results of abandoned work come late): what does
not fit changes nothing but is answered where the learner waits for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class Phase(Enum):
    IDLE = auto()
    PREPARED = auto()  # said READY, waits for begin
    RECEIVING = auto()  # collectives run, the old version serves
    HELD = auto()  # whole and verified; commits when told, so that others go on drawing
    FETCHING = auto()  # FetchWeights runs, the old version serves
    COMMITTING = auto()  # the engine applies; cannot be given up


class EventKind(Enum):
    PREPARE = auto()  # PrepareUpdate(epoch, version)
    BEGIN = auto()  # BeginTransfer(epoch, version)
    ABORT = auto()  # AbortUpdate(epoch)
    COMMIT = auto()  # CommitUpdate(epoch)
    DETACHED = auto()  # the Attend stream was lost
    PUBLISHED = auto()  # version is the newest (also from Welcome)
    BEHIND = auto()  # the driver's clock: behind for too long, in no epoch or in one that does not go on
    RECEIVED = auto()  # the engine's receive of `version` ended well
    FETCHED = auto()  # the engine staged `version` from a fetch
    FAILED = auto()  # receive or fetch ended with an error
    COMMITTED = auto()  # the engine samples from `version`
    REFUSED = auto()  # commit failed before weights were touched
    BROKEN = auto()  # commit failed after weights were touched


class ActionKind(Enum):
    READY = auto()  # reports
    DECLINED = auto()
    REPORT_RECEIVED = auto()
    REPORT_LOADED = auto()
    REPORT_FAILED = auto()
    RECEIVE = auto()  # calls on the engine
    FETCH = auto()
    COMMIT = auto()
    DISCARD = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Example: Event(kind=EventKind.PREPARE, epoch=4, version=9)"""

    kind: EventKind
    epoch: int = 0  # of orders; 0 for the rest
    version: int = 0
    detail: str = ""  # with ABORT, FAILED, REFUSED and BROKEN: why
    hold: bool = False  # with BEGIN: commit only on COMMIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """Example: Action(kind=ActionKind.DECLINED, epoch=4, version=9, detail="version 9 is loaded already")"""

    kind: ActionKind
    epoch: int = 0  # 0 in a fetch: nobody waits for a report
    version: int = 0
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Example: State(phase=Phase.PREPARED, epoch=4, version=9, loaded=8, newest=9)"""

    phase: Phase = Phase.IDLE
    epoch: int = 0  # being run; 0 when idle or in a fetch
    version: int = 0  # being run
    loaded: int = 0  # sampled from; 0 is the base
    newest: int = 0  # heard of
    stale: bool = False
    hold: bool = False  # of the running epoch

    @property
    def behind(self) -> bool:
        """Whether a fetch would bring something: stale replicas need one whatever the version."""
        return self.newest > 0 and (self.newest > self.loaded or self.stale)


Step = tuple[State, tuple[Action, ...]]


def advance(state: State, event: Event) -> Step:
    """The next state and what to do, in order."""
    return _RULES[event.kind](state, event)


def _idle(state: State, **changes: object) -> State:
    return replace(state, phase=Phase.IDLE, epoch=0, version=0, hold=False, **changes)  # type: ignore[arg-type]


def _prepare(state: State, event: Event) -> Step:
    state = replace(state, newest=max(state.newest, event.version))
    answer = {"epoch": event.epoch, "version": event.version}
    if state.phase is Phase.COMMITTING:
        return state, (_action(ActionKind.DECLINED, answer, f"version {state.version} is being committed"),)
    if event.version <= state.loaded and not state.stale:
        return state, (_action(ActionKind.DECLINED, answer, f"version {state.loaded} is loaded"),)
    if state.phase is Phase.FETCHING and state.version >= event.version:
        return state, (_action(ActionKind.DECLINED, answer, f"version {state.version} is being fetched"),)
    if state.phase is Phase.HELD and state.version >= event.version:
        return state, (_action(ActionKind.DECLINED, answer, f"version {state.version} is received and waits to be committed"),)
    given_up = (Action(kind=ActionKind.DISCARD),) if state.phase in (Phase.RECEIVING, Phase.FETCHING, Phase.HELD) else ()
    prepared = replace(state, phase=Phase.PREPARED, epoch=event.epoch, version=event.version, hold=False)
    return prepared, (*given_up, _action(ActionKind.READY, answer))


def _begin(state: State, event: Event) -> Step:
    answer = {"epoch": event.epoch, "version": event.version}
    if state.phase is not Phase.PREPARED or (state.epoch, state.version) != (event.epoch, event.version):
        why = f"epoch {event.epoch} was not prepared: the replica is {state.phase.name} with epoch {state.epoch}, version {state.version}"
        return state, (_action(ActionKind.REPORT_FAILED, answer, why),)
    return replace(state, phase=Phase.RECEIVING, hold=event.hold), (_action(ActionKind.RECEIVE, answer),)


def _abort(state: State, event: Event) -> Step:
    if state.epoch != event.epoch or state.phase not in (Phase.PREPARED, Phase.RECEIVING, Phase.HELD):
        return state, ()
    return _idle(state), _given_up(state)


def _commit(state: State, event: Event) -> Step:
    if state.phase is not Phase.HELD or state.epoch != event.epoch:
        return state, ()
    return replace(state, phase=Phase.COMMITTING), (Action(kind=ActionKind.COMMIT, epoch=state.epoch, version=state.version),)


def _detached(state: State, event: Event) -> Step:
    """The learner forgot this replica's epoch; a fetch or a commit under way goes on, its report is not awaited."""
    if state.phase in (Phase.PREPARED, Phase.RECEIVING, Phase.HELD):
        return _idle(state), _given_up(state)
    return replace(state, epoch=0), ()


def _published(state: State, event: Event) -> Step:
    return replace(state, newest=max(state.newest, event.version)), ()


def _behind(state: State, event: Event) -> Step:
    """Also out of PREPARED: an epoch that never began is not waited for. What is HELD for too long is committed: nobody will say so."""
    if state.phase is Phase.HELD:
        return _commit(state, replace(event, epoch=state.epoch))
    if state.phase not in (Phase.IDLE, Phase.PREPARED) or not state.behind:
        return state, ()
    fetching = replace(state, phase=Phase.FETCHING, epoch=0, version=state.newest)
    return fetching, (Action(kind=ActionKind.FETCH, version=state.newest),)


def _received(state: State, event: Event) -> Step:
    if state.phase is not Phase.RECEIVING or state.version != event.version:
        return state, ()
    answer = {"epoch": state.epoch, "version": state.version}
    if state.hold:
        return replace(state, phase=Phase.HELD), (_action(ActionKind.REPORT_RECEIVED, answer),)
    return replace(state, phase=Phase.COMMITTING), (_action(ActionKind.REPORT_RECEIVED, answer), _action(ActionKind.COMMIT, answer))


def _fetched(state: State, event: Event) -> Step:
    """The fetch may bring a newer version than was asked for."""
    if state.phase is not Phase.FETCHING:
        return state, ()
    committing = replace(state, phase=Phase.COMMITTING, version=event.version, newest=max(state.newest, event.version))
    return committing, (Action(kind=ActionKind.COMMIT, version=event.version),)


def _failed(state: State, event: Event) -> Step:
    if state.phase not in (Phase.RECEIVING, Phase.FETCHING):
        return state, ()
    return _idle(state), (Action(kind=ActionKind.DISCARD), *_report(state, ActionKind.REPORT_FAILED, event.detail))


def _committed(state: State, event: Event) -> Step:
    if state.phase is not Phase.COMMITTING:
        return state, ()
    return _idle(state, loaded=state.version, stale=False), _report(state, ActionKind.REPORT_LOADED)


def _refused(state: State, event: Event) -> Step:
    if state.phase is not Phase.COMMITTING:
        return state, ()
    return _idle(state), (Action(kind=ActionKind.DISCARD), *_report(state, ActionKind.REPORT_FAILED, event.detail))


def _broken(state: State, event: Event) -> Step:
    if state.phase is not Phase.COMMITTING:
        return state, ()
    return _idle(state, stale=True), (Action(kind=ActionKind.DISCARD), *_report(state, ActionKind.REPORT_FAILED, event.detail))


def _given_up(state: State) -> tuple[Action, ...]:
    return (Action(kind=ActionKind.DISCARD),) if state.phase in (Phase.RECEIVING, Phase.HELD) else ()


def _report(state: State, kind: ActionKind, detail: str = "") -> tuple[Action, ...]:
    """A report to the learner: also of fetches (epoch 0), so that it knows at once what is loaded."""
    return (Action(kind=kind, epoch=state.epoch, version=state.version, detail=detail),)


def _action(kind: ActionKind, answer: dict[str, int], detail: str = "") -> Action:
    return Action(kind=kind, epoch=answer["epoch"], version=answer["version"], detail=detail)


_RULES = {
    EventKind.PREPARE: _prepare,
    EventKind.BEGIN: _begin,
    EventKind.ABORT: _abort,
    EventKind.COMMIT: _commit,
    EventKind.DETACHED: _detached,
    EventKind.PUBLISHED: _published,
    EventKind.BEHIND: _behind,
    EventKind.RECEIVED: _received,
    EventKind.FETCHED: _fetched,
    EventKind.FAILED: _failed,
    EventKind.COMMITTED: _committed,
    EventKind.REFUSED: _refused,
    EventKind.BROKEN: _broken,
}
