"""Drives one replica's weight updates: orders of the learner in, calls on the engine, reports out.

    driver = UpdateDriver(engine, source=source)        # fetching.py: the learner, its peers, or a shared folder
    task = asyncio.create_task(driver.run())
    driver.welcome(newest_version)                      # after each handshake of Attend
    driver.order(response)                              # each AttendResponse; orders not about weights are ignored
    report = await driver.next_report()                 # UpdateReports for Attend, in order
    driver.detached()                                   # the Attend stream was lost: its epoch is over

    orders, results --> advance (transaction.py) --> reports
                            |
                            v
    lane: consumes engine actions one at a time, produces their results; waits for the engine, each call with a deadline;
          a running receive or fetch is cancelled by a discard.        clock: produces BEHIND.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from protos.weights.errors import TransferError
from rollout_server.weights.fetching import Source
from rollout_server.weights.lane import Lane
from rollout_server.weights.probing import disagreement, probe_of
from rollout_server.weights.transaction import Action, ActionKind, Event, EventKind, Phase, State, advance

log = logging.getLogger("headrace.rollout.weights")

_TICK_S = 0.05
_PREPARED_S = 30.0  # an epoch that was prepared but never begun, or held but never committed, is not waited for longer
_LONGEST_BACKOFF_S = 30.0
_MARGIN_S = 5.0  # the engine's own deadline comes first: its error says more

_PHASES = {
    ActionKind.READY: pb.UPDATE_PHASE_READY,
    ActionKind.DECLINED: pb.UPDATE_PHASE_DECLINED,
    ActionKind.REPORT_RECEIVED: pb.UPDATE_PHASE_RECEIVED,
    ActionKind.REPORT_LOADED: pb.UPDATE_PHASE_LOADED,
    ActionKind.REPORT_FAILED: pb.UPDATE_PHASE_FAILED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitTimes:
    """Example: CommitTimes(pause_s=0.03)"""

    pause_s: float  # from pause to resume: nothing was drawn
    pieces_s: dict[str, float] = field(default_factory=dict)  # of it, by name in the order they ended


class CommitError(RuntimeError):
    """The engine failed after weights were touched: what it serves is undefined until the next full update."""


class Updatable(Protocol):
    """What the driver needs of an engine. Everything before commit leaves the serving weights alone."""

    @property
    def loaded_version(self) -> int:
        """Version sampled from; 0 for the base weights."""

    async def receive(self, group: bytes, manifest: bytes, timeout_s: float) -> None:
        """Receives by collectives into staging and verifies (protos/weights/landing.py). Raises when it could not. May be
        cancelled; `discard` follows then."""

    async def stage_folder(self, folder: Path, manifest: bytes, timeout_s: float) -> None:
        """Reads a version's bucket files (rank-R.bin) from a folder of this machine into staging and verifies. As `receive`."""

    async def stage_chunks(self, manifest: bytes, chunks: AsyncIterator[tuple[int, int, bytes]]) -> None:
        """Receives (bucket, offset, data) into staging and verifies. Raises when it could not. May be cancelled likewise."""

    async def commit(self, version: int) -> CommitTimes:
        """pause < apply < flush < version < resume. Raises CommitError when weights may have been touched (then it serves
        nothing), any other error when they were not (then the old version serves)."""

    async def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each token but the first, given those before it, under the loaded weights at temperature 1."""

    async def discard(self) -> None:
        """Gives up a running receive and frees staging; never raises for having nothing to discard."""


class UpdateDriver:
    """One replica's updates, one at a time. All methods on one event loop."""

    def __init__(
        self,
        engine: Updatable,
        *,
        source: Source,
        catch_up_s: float = 2.0,
        receive_timeout_s: float = 300.0,
        keep_mirror: bool = False,
        committed: Callable[[dict[str, float]], None] = lambda pieces_s: None,
    ) -> None:
        """receive_timeout_s: of a transfer, a fetch or a commit; longer where the learner gives its own epochs longer (`welcome`).
        keep_mirror: what was fetched is kept for peers and for deltas also where pushes follow. committed: called with the pieces of each pause."""
        self._engine = engine
        self._source = source
        self._catch_up_s = catch_up_s
        self._least_timeout_s = self._receive_timeout_s = receive_timeout_s
        self._keep_mirror = keep_mirror
        self._committed = committed
        self._state = State(loaded=engine.loaded_version)
        self._attached = False
        self._transfers: dict[int, pb.BeginTransfer] = {}  # by epoch, while it may be received
        self._lane = Lane(self._execute, self._apply)
        self._reports: asyncio.Queue[pb.UpdateReport] = asyncio.Queue()
        self._transfer_s = self._pause_s = 0.0
        self._pieces_s: dict[str, float] = {}
        self._probe: manifest_pb2.Probe | None = None  # of the version being brought
        self._num_failures = 0  # in a row

    @property
    def stale(self) -> bool:
        """Whether the engine serves nothing until the next full update."""
        return self._state.stale

    @property
    def committing(self) -> bool:
        """Whether a version is being put in place, so that nothing is drawn."""
        return self._state.phase is Phase.COMMITTING

    @property
    def newest_version(self) -> int:
        """Newest version heard of; 0 before the first."""
        return self._state.newest

    @property
    def state(self) -> State:
        """For status and tests."""
        return self._state

    def welcome(self, newest_version: int, push_deadline_s: float = 0.0) -> None:
        """The replica attends. push_deadline_s: after which the learner gives up an epoch."""
        self._attached = True
        self._receive_timeout_s = max(self._least_timeout_s, push_deadline_s)
        self._apply(Event(kind=EventKind.PUBLISHED, version=newest_version))

    def detached(self) -> None:
        """The Attend stream was lost. Reports not yet sent are dropped: the next handshake and heartbeats say what is loaded."""
        self._attached = False
        self._apply(Event(kind=EventKind.DETACHED))
        while not self._reports.empty():
            self._reports.get_nowait()

    def order(self, response: pb.AttendResponse) -> None:
        """Takes published, prepare_update, begin_transfer, abort_update and commit_update; never blocks."""
        match response.WhichOneof("message"):
            case "published":
                self._apply(Event(kind=EventKind.PUBLISHED, version=response.published.version))
            case "prepare_update":
                order = response.prepare_update
                self._apply(Event(kind=EventKind.PREPARE, epoch=order.epoch, version=order.version))
            case "begin_transfer":
                begin = response.begin_transfer
                if begin.epoch == self._state.epoch:
                    self._transfers = {begin.epoch: begin}
                self._apply(Event(kind=EventKind.BEGIN, epoch=begin.epoch, version=begin.manifest.version, hold=begin.hold))
            case "commit_update":
                self._apply(Event(kind=EventKind.COMMIT, epoch=response.commit_update.epoch))
            case "abort_update":
                abort = response.abort_update
                self._apply(Event(kind=EventKind.ABORT, epoch=abort.epoch, detail=abort.reason))

    async def next_report(self) -> pb.UpdateReport:
        """Blocks until there is one."""
        return await self._reports.get()

    async def current(self) -> None:
        """Returns once the newest version heard of is loaded and nothing is in work."""
        while self._state.behind or self._state.phase not in (Phase.IDLE, Phase.PREPARED) or not self._lane.idle:
            await asyncio.sleep(_TICK_S)

    async def run(self) -> None:
        """Until cancelled."""
        clock = asyncio.create_task(self._clock())
        try:
            await self._lane.run()
        finally:
            clock.cancel()

    def _apply(self, event: Event) -> None:
        before = self._state
        self._state, actions = advance(before, event)
        if event.kind in (EventKind.FAILED, EventKind.REFUSED, EventKind.BROKEN):
            self._num_failures += 1
            log.warning("version %d %s: %s", before.version, event.kind.name.lower(), event.detail)
        elif event.kind is EventKind.COMMITTED:
            self._num_failures = 0
            if before.epoch and not self._keep_mirror:
                self._source.mirror.remove()  # a push brought it: what was fetched once is only memory
            log.info("version %d loaded: transfer %.3f s, pause %.3f s", event.version, self._transfer_s, self._pause_s)
        for action in actions:
            if action.kind in _PHASES:
                self._reports.put_nowait(self._report(action))
            else:
                self._lane.add(action)

    def _report(self, action: Action) -> pb.UpdateReport:
        if self._state.stale:
            serving = rollout_pb2.REPLICA_STATE_STALE
        else:
            serving = rollout_pb2.REPLICA_STATE_SERVING if self._state.loaded else rollout_pb2.REPLICA_STATE_WAITING
        report = pb.UpdateReport(epoch=action.epoch, version=action.version, phase=_PHASES[action.kind], detail=action.detail, state=serving)
        if action.kind is ActionKind.REPORT_LOADED:
            report.transfer_s, report.pause_s = self._transfer_s, self._pause_s
            report.pieces_s.update(self._pieces_s)
        return report

    async def _execute(self, action: Action) -> Event | None:
        """One call on the engine; its failure is an event."""
        began = asyncio.get_running_loop().time()
        try:
            match action.kind:
                case ActionKind.RECEIVE:
                    await self._receive(self._transfers[action.epoch])
                    self._transfer_s = asyncio.get_running_loop().time() - began
                    return Event(kind=EventKind.RECEIVED, version=action.version)
                case ActionKind.FETCH:
                    version = await self._fetched()
                    self._transfer_s = asyncio.get_running_loop().time() - began
                    return Event(kind=EventKind.FETCHED, version=version)
                case ActionKind.COMMIT:
                    return await self._commit(action.version)
                case _:
                    await self._engine.discard()
                    return None
        except Exception as error:  # supervised edge: engines raise what they like; it is reported, logged and counted in _apply
            if action.kind is ActionKind.DISCARD:
                log.exception("discard failed")
                return None
            return Event(kind=EventKind.FAILED, version=action.version, detail=_words(error))

    async def _receive(self, begin: pb.BeginTransfer) -> None:
        self._probe = probe_of(begin.manifest)
        call = self._engine.receive(begin.group.SerializeToString(), begin.manifest.SerializeToString(), self._receive_timeout_s)
        await asyncio.wait_for(call, self._receive_timeout_s + _MARGIN_S)

    async def _fetched(self) -> int:
        """`_stage`, by its deadline; its failure says how far the copy has come."""
        try:
            return await asyncio.wait_for(self._stage(), self._receive_timeout_s)
        except TransferError:
            raise
        except Exception as error:
            lacking = self._source.mirror.lacking()
            why = f"it did not end within {self._receive_timeout_s:g} s" if isinstance(error, TimeoutError) and not str(error) else str(error)
            raise RuntimeError(f"the fetch of version {self._state.newest} failed: {type(error).__name__}: {why}" + f"; {lacking}" * bool(lacking)) from error

    async def _stage(self) -> int:
        """Fetches the newest version into staging; its number. Nothing is built upon after a commit that broke."""
        mirror = self._source.mirror
        if self._state.stale:
            mirror.doubt()
        await self._source.bring(self._state.newest)
        try:
            await self._engine.stage_folder(mirror.folder, mirror.manifest.SerializeToString(), self._receive_timeout_s)
        except BaseException:
            mirror.doubt()
            raise
        mirror.confirm()
        self._probe = probe_of(mirror.manifest)
        return mirror.manifest.version

    async def _commit(self, version: int) -> Event:
        try:
            times = await asyncio.wait_for(self._engine.commit(version), self._receive_timeout_s)
        except TimeoutError:  # a commit that outlasts its deadline may have touched anything
            return Event(kind=EventKind.BROKEN, version=version, detail=f"TimeoutError: version {version} was not applied within {self._receive_timeout_s:g} s")
        except CommitError as error:
            return Event(kind=EventKind.BROKEN, version=version, detail=_words(error))
        except Exception as error:  # supervised edge, as in _execute
            return Event(kind=EventKind.REFUSED, version=version, detail=_words(error))
        self._pause_s, self._pieces_s = times.pause_s, times.pieces_s
        self._committed(times.pieces_s)
        if self._probe is not None and (why := await disagreement(self._engine.probe, self._probe, limit_s=self._receive_timeout_s)):
            return Event(kind=EventKind.BROKEN, version=version, detail=why)
        return Event(kind=EventKind.COMMITTED, version=version)

    async def _clock(self) -> None:
        """Says BEHIND once the replica has been behind, and in no epoch, for long enough."""
        loop = asyncio.get_running_loop()
        phase, since = self._state.phase, loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            waits = self._attached and self._state.behind and self._state.phase in (Phase.IDLE, Phase.PREPARED, Phase.HELD)
            if not waits or self._state.phase is not phase:
                phase, since = self._state.phase, loop.time()
            if waits and loop.time() - since >= self._patience_s():
                self._apply(Event(kind=EventKind.BEHIND))
                since = loop.time()  # a fetch may fail before the next tick sees that there was one

    def _patience_s(self) -> float:
        """At once for a replica that can serve nothing of this run, catch_up_s for others; longer after failures in a row."""
        if self._state.phase in (Phase.PREPARED, Phase.HELD):
            return _PREPARED_S
        if self._num_failures == 0:
            return self._catch_up_s if self._state.loaded and not self._state.stale else 0.0
        return min(self._catch_up_s * 2.0 ** (self._num_failures - 1), max(_LONGEST_BACKOFF_S, self._catch_up_s))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}".rstrip(": ")
