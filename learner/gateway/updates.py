"""Drives weight-update epochs: feeds epochs.py with what ranks, replicas and clocks say, and does what it answers.

    event from                  who feeds it
    trainer ranks               begin, end (their calls wait for the futures `settled` and `finished`)
    replicas                    report, lost (called by attendance)
    clocks                      prepare_s, deadline_s, and a shortened deadline once a rank failed
    a new trainer incarnation   abandon

One epoch runs at a time. Every future here is resolved by an event or by a clock, so no call waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from learner.gateway import epochs
from learner.gateway.attendance import Attendance
from learner.gateway.epochs import Epoch, Member, Phase
from learner.gateway.membership import Groups, make_groups
from learner.gateway.replicas import Replica
from learner.gateway.snapshots import Snapshots
from learner.gateway.transports import Transports
from learner.gateway.waves import Waves
from protos.learner.v1alpha1 import learner_pb2 as pb

logger = logging.getLogger("headrace.learner.updates")

HURRY_GRACE_S = 5.0  # beyond one collective's timeout, for members to report what they found
_PHASES = {
    pb.UPDATE_PHASE_READY: Phase.READY,
    pb.UPDATE_PHASE_DECLINED: Phase.DECLINED,
    pb.UPDATE_PHASE_RECEIVED: Phase.RECEIVED,
    pb.UPDATE_PHASE_LOADED: Phase.LOADED,
    pb.UPDATE_PHASE_FAILED: Phase.FAILED,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Clocks of an epoch, in seconds."""

    prepare_s: float
    collective_timeout_s: float
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """What BeginUpdate answers. No members: the epoch is over."""

    epoch: int
    members: tuple[Member, ...]
    groups: tuple[pb.GroupSpec, ...]  # one for each transport in use, receiver_rank 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What one BeginUpdate is idempotent by, beside the rank."""

    incarnation: int  # of the trainer
    version: int
    attempt: int


class _Run:
    """The running (or last) epoch, its waiting calls and its clocks."""

    def __init__(self, key: Key, epoch: Epoch) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.epoch = epoch
        self.store = ("", 0)
        self.devices: dict[int, str] = {}  # rank to its device's UUID, empty on CPU
        self.sent: dict[int, dict[str, Any]] = {}  # rank to what it reported of its sending
        self.transports: dict[Member, pb.Transport] = {}  # chosen with the candidates
        self.settled: asyncio.Future[Settlement] = loop.create_future()
        self.finished: asyncio.Future[epochs.Finish] = loop.create_future()
        self.clocks: list[asyncio.TimerHandle] = []

    def stop_clocks(self) -> None:
        for clock in self.clocks:
            clock.cancel()


class Updates:
    """Who takes part in pushing a version, and how it ended. `record` gets a line an epoch (pushes.jsonl), `record_load` one for each
    version that a replica loaded, by whatever way (loads.jsonl)."""

    def __init__(self, attendance: Attendance, snapshots: Snapshots, *, transports: Transports, limits: Limits, record: Callable[[dict[str, Any]], None], record_load: Callable[[dict[str, Any]], None], generating_share: float = 0.0) -> None:
        self._attendance = attendance
        self._snapshots = snapshots
        self._transports = transports
        self._limits = limits
        self._record = record
        self._record_load = record_load
        self._run: _Run | None = None
        self._blamed: set[Member] = set()  # in earlier attempts of this version
        self._has: dict[Member, int] = {}  # newest version that a replica reported whole
        self._waves = Waves(generating_share=generating_share)
        # Unique over restarts of the gateway, since trainers and replicas outlive it; drawn, since a clock may be set back.
        self._last_number = secrets.randbits(48)
        self._group: tuple[int, tuple[Member, ...], str] | None = None  # of the last epoch that ended well
        attendance.reported.append(self.report)
        attendance.lost.append(self.lost)

    async def begin(self, key: Key, rank: int, store: tuple[str, int], *, num_ranks: int, device: str = "") -> Settlement:
        """One rank's BeginUpdate. A key older than the running one has no members: other ranks skipped to a newer version."""
        run = self._run_of(key, num_ranks)
        if run is None:
            return Settlement(epoch=0, members=(), groups=())
        if rank == 0:
            run.store = store
        run.devices[rank] = device
        self._feed(run, epochs.Began(rank))
        return await asyncio.shield(run.settled)

    async def end(self, number: int, rank: int, *, ok: bool, error: str, sent: dict[str, Any] | None = None) -> epochs.Finish:
        """One rank's EndUpdate. An epoch that this process does not know (it was restarted) has no outcomes and no retry."""
        run = self._run
        if run is None or run.epoch.number != number:
            return epochs.Finish((), False, False, (), ())
        if not ok:
            logger.warning("epoch %d: rank %d failed: %s", number, rank, error)
        run.sent[rank] = {"rank": rank, "ok": ok, "error": error, **(sent or {})}
        self._feed(run, epochs.Ended(rank, ok))
        return await asyncio.shield(run.finished)

    def report(self, replica: Replica, report: pb.UpdateReport) -> None:
        """A replica's UpdateReport; epoch 0 or an older one tells only what it has."""
        phase = _PHASES.get(report.phase)
        if phase in (Phase.RECEIVED, Phase.LOADED):
            self._has[replica.member] = max(self._has.get(replica.member, 0), report.version)
        if phase is Phase.FAILED:
            self._has.pop(replica.member, None)
        if phase is Phase.LOADED:
            replica.update_succeeded()
            self._record_load({
                "replica_id": replica.member[0], "version": report.version, "epoch": report.epoch, "time_s": time.time(), "transfer_s": report.transfer_s,
                "pause_s": report.pause_s, "pieces_s": dict(report.pieces_s),
            })  # fmt: skip
        if phase is Phase.FAILED and not report.epoch:
            replica.update_failed(report.detail)  # a fetch: no epoch will say so
        self._commit_more(self._waves.report(report.epoch, replica.member, phase))
        if phase is not None and self._run is not None and self._run.epoch.number == report.epoch:
            self._feed(self._run, epochs.Reported(replica.member, phase, report.detail))

    def lost(self, replica_id: str, incarnation: int) -> None:
        """The replica's stream ended."""
        member = (replica_id, incarnation)
        self._has.pop(member, None)
        self._commit_more(self._waves.lost(member))
        if self._run is not None:
            self._feed(self._run, epochs.Reported(member, Phase.LOST, "its stream was lost"))

    def abandon(self) -> None:
        """A new trainer incarnation is on duty: the running epoch is over and its communicators are dead."""
        self._group = None
        if self._run is not None:
            self._feed(self._run, epochs.Abandoned())

    def _run_of(self, key: Key, num_ranks: int) -> _Run | None:
        """The run of this key, begun where it is newer than the last one; None for an older key."""
        run = self._run
        if run is not None and run.key == key:
            return run
        if run is not None and run.key.incarnation == key.incarnation and (key.version, key.attempt) < (run.key.version, run.key.attempt):
            return None
        if run is not None:
            self._feed(run, epochs.Abandoned())
        if run is None or run.key.version != key.version:
            self._blamed.clear()
        self._last_number += 1
        self._run = run = _Run(key, Epoch(number=self._last_number, version=key.version, num_ranks=num_ranks))
        self._clock(run, self._limits.collective_timeout_s, epochs.DeadlineOver(), only=epochs.State.GATHERING)
        return run

    def _clock(self, run: _Run, after_s: float, event: epochs.Event, only: epochs.State) -> None:
        def fire() -> None:
            if run.epoch.state is only:
                self._feed(run, event)

        run.clocks.append(asyncio.get_running_loop().call_later(after_s, fire))

    def _feed(self, run: _Run, event: epochs.Event) -> None:
        run.epoch, actions = epochs.step(run.epoch, event)
        for action in actions:
            self._do(run, action)

    def _do(self, run: _Run, action: epochs.Action) -> None:
        match action:
            case epochs.Choose():
                self._feed(run, epochs.Chosen(self._candidates(run)))
            case epochs.Prepare(asked):
                order = pb.AttendResponse(prepare_update=pb.PrepareUpdate(epoch=run.epoch.number, version=run.key.version))
                self._send_all(asked, order)
                self._clock(run, self._limits.prepare_s, epochs.PrepareOver(), only=epochs.State.PREPARING)
            case epochs.Settle(members, left_out):
                self._settle(run, members, left_out)
            case epochs.Hurry():
                hurry_s = self._limits.collective_timeout_s + HURRY_GRACE_S
                self._clock(run, hurry_s, epochs.DeadlineOver(), only=epochs.State.TRANSFERRING)
            case epochs.Finish():
                self._finish(run, action)

    def _candidates(self, run: _Run) -> tuple[Member, ...]:
        """Attending replicas that lack the version and can be reached by some transport, by replica_id."""
        key = run.key
        if self._snapshots.find(key.version) is None:
            return ()
        taken: set[str] = set()  # devices that receive by NCCL
        for replica in self._attendance.attending():
            member = replica.member
            has = max(replica.loaded_version, self._has.get(member, 0))
            if has >= key.version or replica.left_out or member in self._blamed:
                continue
            transport, why = self._transports.of_replica(replica.claim, run.devices, taken)
            if why:
                replica.detail = why
            if transport == pb.TRANSPORT_UNSPECIFIED:
                continue  # it fetches
            if transport == pb.TRANSPORT_NCCL:
                taken |= set(replica.claim.worker_devices or (replica.claim.device_uuid,)) - {""}
            run.transports[member] = transport
        return tuple(run.transports)

    def _settle(self, run: _Run, members: tuple[Member, ...], left_out: tuple[Member, ...]) -> None:
        number = run.epoch.number
        self._send_all(left_out, _abort(number, "the epoch was settled without this replica"))
        snapshot = self._snapshots.find(run.key.version)
        if snapshot is None or not members:
            run.settled.set_result(Settlement(epoch=number, members=(), groups=()))
            self._feed(run, epochs.Abandoned())
            self._close(run, epochs.Finish((), False, False, (), ()))
            return
        hold = self._waves.begin(number, members, num_attending=len(self._attendance.attending()))
        groups = self._groups(run, members)
        for member, spec in groups.specs.items():
            self._attendance.send(member, pb.AttendResponse(begin_transfer=pb.BeginTransfer(epoch=number, group=spec, manifest=snapshot.manifest, hold=hold)))
        logger.info("epoch %d: version %d goes to %s", number, run.key.version, ", ".join(name for name, _ in members))
        self._clock(run, self._limits.deadline_s, epochs.DeadlineOver(), only=epochs.State.TRANSFERRING)
        run.settled.set_result(Settlement(epoch=number, members=members, groups=groups.senders))

    def _groups(self, run: _Run, members: tuple[Member, ...]) -> Groups:
        """The groups of this membership: those of the last epoch when it is the same and ended well, else fresh ones."""
        if self._group is None or self._group[:2] != (run.key.incarnation, members):
            self._group = (run.key.incarnation, members, f"{run.key.incarnation}-{run.epoch.number}")
        common = pb.GroupSpec(
            store_host=run.store[0], store_port=run.store[1], group_key=self._group[2], num_owners=run.epoch.num_ranks,
            collective_timeout_s=self._limits.collective_timeout_s,
        )  # fmt: skip
        workers = {replica.member: replica.claim.num_workers for replica in self._attendance.attending()}
        return make_groups(common, [(member, run.transports[member], workers.get(member, 1)) for member in members])

    def _commit_more(self, members: tuple[Member, ...]) -> None:
        self._send_all(members, pb.AttendResponse(commit_update=pb.CommitUpdate(epoch=self._waves.epoch)))

    def _finish(self, run: _Run, finish: epochs.Finish) -> None:
        if not finish.clean:
            self._group = None
        self._send_all(finish.unfinished, _abort(run.epoch.number, "the epoch is over"))
        for member, phase, detail in finish.outcomes:
            replica = self._attendance.replicas.get(member[0])
            if replica is None or replica.member != member:
                continue
            if member in finish.blamed:
                replica.update_failed(detail or f"version {run.key.version}: {phase.value}")
            elif phase in (Phase.RECEIVED, Phase.LOADED):
                replica.failures_in_row = 0
        self._blamed.update(finish.blamed)
        logger.info("epoch %d: %s%s", run.epoch.number, ", ".join(f"{m[0]} {p.value}" for m, p, _ in finish.outcomes), "; retry" if finish.retry else "")
        self._record(_line(run, finish))
        self._close(run, finish)

    def _close(self, run: _Run, finish: epochs.Finish) -> None:
        run.stop_clocks()
        if not run.finished.done():
            run.finished.set_result(finish)

    def _send_all(self, members: tuple[Member, ...], order: pb.AttendResponse) -> None:
        for member in members:
            self._attendance.send(member, order)


def _line(run: _Run, finish: epochs.Finish) -> dict[str, Any]:
    """What pushes.jsonl keeps of an epoch: who sent how many bytes holding how many, and what became of each replica."""
    return {
        "epoch": run.epoch.number, "version": run.key.version, "attempt": run.key.attempt, "time_s": time.time(),
        "transport": "+".join(sorted({pb.Transport.Name(run.transports[member]) for member, _, _ in finish.outcomes})), "ranks": [run.sent[rank] for rank in sorted(run.sent)],
        "members": [{"replica_id": member[0], "phase": phase.value, "detail": detail} for member, phase, detail in finish.outcomes],
        "retry": finish.retry,
    }  # fmt: skip


def _abort(number: int, reason: str) -> pb.AttendResponse:
    return pb.AttendResponse(abort_update=pb.AbortUpdate(epoch=number, reason=reason))
