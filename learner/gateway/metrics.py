"""The figures of the gateway (docs/metrics.md); those of the trainer are in trainer_metrics.py."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from learner.config import LearnerConfig
from learner.gateway import trainer_metrics
from learner.gateway.attendance import Attendance
from learner.gateway.books import Books
from learner.gateway.counters import PushCounters, StepClock
from learner.gateway.last_step import LastStep, rank_memory_bytes
from learner.gateway.ledger import Ledger
from learner.gateway.lookout import Bulletin
from learner.gateway.replicas import DRAINING, SERVING, STALE, STARTING, WAITING, GpuSeen, Replica
from learner.gateway.saving import Saving
from learner.trackers.keeping import count as count_trackers
from learner.watch.alarms import ALARMS
from protos.exporting import Figure
from protos.gpus import Gpus
from protos.resources import resource_figures

STATES = {STARTING: "starting", WAITING: "waiting", SERVING: "serving", STALE: "stale", DRAINING: "draining"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What the figures are read of."""

    config: LearnerConfig
    books: Books
    attendance: Attendance
    saving: Saving
    pushes: PushCounters
    steps: StepClock
    last: LastStep
    gpus: Gpus
    num_refused: Callable[[], int]
    waited_s: Callable[[], float]  # by the trainer, for batches
    bulletin: Bulletin

    @property
    def ledger(self) -> Ledger:
        return self.books.ledger


def _groups(seen: Seen) -> dict[str, float | None]:
    counts = seen.ledger.counts()
    return {"leased": counts.leased, "trained": counts.trained, "dropped": sum(counts.dropped.values()), "open": counts.open, "waiting": counts.waiting}


def _replicas(seen: Seen) -> dict[str, float | None]:
    found = Counter(STATES.get(replica.state, "starting") if replica.attending else "gone" for replica in seen.attendance.replicas.values())
    return {state: found[state] for state in (*STATES.values(), "gone")}


def _each(read: Callable[[Replica], float]) -> Callable[[Seen], dict[str, float | None]]:
    """Of each replica that attends."""
    return lambda seen: {replica.claim.replica_id: read(replica) for replica in seen.attendance.attending()}


def _states(seen: Seen) -> dict[tuple[str, str], float | None]:
    return {(replica.claim.replica_id, name): float(replica.state == state) for replica in seen.attendance.attending() for state, name in STATES.items()}


def _stalled_s(seen: Seen) -> dict[str, float | None]:
    """Of those that attend, and of those that were lost."""
    now_s = asyncio.get_running_loop().time()
    return {replica.claim.replica_id: replica.stalled_s(now_s) for replica in seen.attendance.replicas.values()}


def _scorings(seen: Seen) -> dict[tuple[str, str], float | None]:
    return {(replica.claim.replica_id, outcome): count for replica in seen.attendance.attending() for outcome, count in (("scored", replica.num_scored), ("unscored", replica.num_unscored))}


def _replica_gpus(read: Callable[[GpuSeen], float]) -> Callable[[Seen], dict[tuple[str, str, str], float | None]]:
    return lambda seen: {(replica.claim.replica_id, gpu.index, gpu.uuid): read(gpu) for replica in seen.attendance.attending() for gpu in replica.gpus}


def _silent_s(seen: Seen) -> dict[str, float | None]:
    now_s = asyncio.get_running_loop().time()
    return {replica.claim.replica_id: max(0.0, now_s - replica.heard_s) for replica in seen.attendance.attending()}


def _oldest_open_s(seen: Seen) -> float:
    opened_at = seen.ledger.oldest_opened_at
    return 0.0 if opened_at is None else max(0.0, time.time() - opened_at)


def _disk(seen: Seen) -> dict[str, float | None]:
    try:
        found = os.statvfs(seen.config.run_dir)
    except OSError:
        return {}
    return {"free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize}


def _gauge(name: str, text: str, read: Callable[[Seen], Any], *labels: str) -> Figure[Seen]:
    return Figure(name=f"headrace_gateway_{name}", kind="gauge", labels=labels, text=text, read=read)


def _counter(name: str, text: str, read: Callable[[Seen], Any], *labels: str) -> Figure[Seen]:
    return Figure(name=f"headrace_gateway_{name}_total", kind="counter", labels=labels, text=text, read=read)


FIGURES: tuple[Figure[Seen], ...] = (
    _gauge("closed_steps", "Steps of the surviving history.", lambda s: s.ledger.step),
    _gauge("wanted_steps", "Steps that the run is to make.", lambda s: s.config.steps),
    _gauge("step_age_seconds", "Time since the last version was published (before the first: since the start).", lambda s: s.steps.age_s),
    _gauge("rollbacks", "Rollbacks to a cut in the whole run (the lineage).", lambda s: s.ledger.lineage),
    _gauge("published_version", "Newest version published.", lambda s: s.ledger.account.versions.last_number),
    _gauge("loaded_version", "Version that each replica samples from.", _each(lambda r: r.loaded_version), "replica"),
    _gauge("groups", "Groups of the surviving history by state: leased = trained + dropped + open; waiting ones are open and complete.", _groups, "state"),
    _gauge("max_open_groups", "Groups that may be open at once: (S + 1) P - (W - 1).", lambda s: s.ledger.max_open),
    _gauge("dropped_groups", "Groups dropped in the surviving history, by reason.", lambda s: s.ledger.counts().dropped, "reason"),
    _gauge("oldest_open_seconds", "Age of the oldest open group.", _oldest_open_s),
    _counter("unusable_samples", "Samples that could not be trained on since the gateway started, by reason.", lambda s: s.books.unusable, "reason"),
    _counter("stopped_samples", "Samples that were not waited for because their group was decided without them, by why.", lambda s: s.books.stopped, "reason"),
    _counter("progress_reports", "Reports of unfinished samples that were kept since the gateway started.", lambda s: s.books.progress["reports"]),
    _counter("continued_samples", "Samples that were lent again with what an earlier replica had drawn of them.", lambda s: s.books.progress["samples"]),
    _counter("continued_tokens", "Tokens of those samples: nobody had to draw them again.", lambda s: s.books.progress["tokens"]),
    _gauge("progress_bytes", "Tokens and log-probs that are kept of unfinished samples.", lambda s: s.ledger.progress_bytes),
    _gauge("trained_tokens", "Trained tokens of the surviving history by staleness: the histogram.", lambda s: s.ledger.trained_tokens_by_staleness(), "staleness"),
    _gauge("staleness_bound_steps", "The bound S that groups are admitted under now.", lambda s: s.ledger.bound),
    _gauge("replicas", "Replicas by state; gone ones attended before.", _replicas, "state"),
    _counter("replica_tokens", "Tokens that each replica has drawn since its start.", _each(lambda r: r.num_tokens), "replica"),
    _counter("replica_idle_seconds", "Time in which each replica had no request, since its start.", _each(lambda r: r.idle_s), "replica"),
    _gauge("replica_running_requests", "Requests at each replica.", _each(lambda r: r.num_running), "replica"),
    _gauge("replica_silent_seconds", "Time since each replica was heard of.", _silent_s, "replica"),
    _gauge("replica_failed_updates", "Updates in a row that failed for each replica.", _each(lambda r: r.failures_in_row), "replica"),
    _gauge("replica_state", "1 for the state that each replica is in, 0 for the others.", _states, "replica", "state"),
    _gauge("replica_stalled_seconds", "Time since each replica last drew a token, had nothing to draw, or was heard of; also of replicas that left without a goodbye, for half an hour.", _stalled_s, "replica"),
    _counter("replica_drawing_seconds", "Time of samples at the engine, summed over samples, those under way included.", _each(lambda r: r.drawing_s), "replica"),
    _counter("replica_scoring_seconds", "Time in which samples waited for their score, likewise.", _each(lambda r: r.scoring_s), "replica"),
    _gauge("replica_scoring_samples", "Samples that wait for their score.", _each(lambda r: r.num_scoring), "replica"),
    _counter("replica_scorings", "Samples by whether they got a score.", _scorings, "replica", "outcome"),
    _gauge("replica_gpu_use_ratio", "Use of the GPUs of each replica, as it tells.", _replica_gpus(lambda gpu: gpu.use), "replica", "gpu", "uuid"),
    _counter("push_replicas", "Replicas in push epochs by outcome: received, loaded, declined, failed, lost and others that ended an epoch.", lambda s: s.pushes.outcomes, "outcome"),
    _counter("push_epochs", "Push epochs.", lambda s: s.pushes.num_epochs),
    _counter("push_seconds", "Time of epochs, each that of its slowest rank.", lambda s: s.pushes.seconds),
    _counter("push_bytes", "Bytes that ranks sent.", lambda s: s.pushes.num_bytes),
    _counter("loads", "Versions that replicas loaded, by push or by fetching.", lambda s: s.pushes.num_loads),
    _counter("load_seconds", "Time of their transfers.", lambda s: s.pushes.transfer_s),
    _counter("pause_seconds", "Time in which replicas drew nothing for an update, by piece.", lambda s: s.pushes.pieces_s, "piece"),
    _gauge("journal_bytes", "Size of the journal.", lambda s: s.books.journal.num_bytes),
    _counter("journal_syncs", "Batches that the journal made durable.", lambda s: s.books.journal.num_syncs),
    _counter("journal_sync_seconds", "Time waited for the disk (or Redis) to make them so.", lambda s: s.books.journal.sync_s),
    _counter("batch_wait_seconds", "Time in which the trainer waited for a batch, a wait that goes on included.", lambda s: s.waited_s()),
    _counter("failed_saves", "Saves that did not become cuts.", lambda s: s.saving.num_failed),
    _gauge("alarms", "1 while training waits because the journal is full and no cut can be made.", lambda s: float(bool(s.saving.alarm))),
    _gauge("alarm_firing", "1 for each alarm that the gateway itself finds firing, 0 for the others.", lambda s: {name: float(name in {fire.alarm.name for fire in s.bulletin.firing}) for name in ALARMS}, "alarm"),
    _counter("diagnoses", "Diagnoses that alarms began: made, and failed.", lambda s: {"made": s.bulletin.num_diagnoses, "failed": s.bulletin.num_failed_diagnoses}, "outcome"),
    _gauge("trackers", "Trackers of the run by state: following, or dropped since the learner started.", lambda s: count_trackers(s.config.run_dir, s.config.trackers.wanted()), "state"),
    _gauge("disk_bytes", "The file system of the run folder: free, size.", _disk, "measure"),
    _gauge("step_gpu_use_ratio", "Mean use of the learner's GPUs over the newest step.", lambda s: s.steps.use),
    _gauge("low_use_steps", "Steps in a row with a mean use of the learner's GPUs under alarms.low_use (0.5).", lambda s: s.steps.num_low),
    _counter("refused_calls", "Calls and connections without this run's token or TLS.", lambda s: s.num_refused()),
    *resource_figures("gateway", lambda s: s.gpus),
    Figure(name="headrace_trainer_memory_bytes", kind="gauge", labels=("rank",), text="Resident memory of each trainer rank of the gateway's machine.", read=lambda _: rank_memory_bytes(os.getppid())),
    *(figure.of(lambda seen: seen.last) for figure in trainer_metrics.FIGURES),
)
