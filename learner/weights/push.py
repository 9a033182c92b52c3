"""Sends published versions to the replicas while the trainer trains on: one background thread a rank.

    pusher = Pusher(address=gateway, incarnation=ns, rank=r, world_size=n, device=torch.device("cpu"), store_host=store_host(config.address))
    pusher.submit(version, snapshot)     # every rank, after CloseBatch; returns at once
    row["push"] = pusher.metrics()
    pusher.close(timeout_s=30.0)

Push thread: consumes the newest submitted version (a queue of one), produces epochs (BeginUpdate, buckets, EndUpdate),
waits for the gateway and for receivers, each with a deadline; unblocked by close().
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta

import grpc
import torch
import torch.distributed as dist

from learner.weights.sender import OpenSnapshot, Sender
from learner.weights.snapshot import Snapshot
from protos import rpc
from protos.learner.v1alpha1 import feed_pb2, feed_pb2_grpc, learner_pb2
from protos.weights.errors import TransferError

log = logging.getLogger("headrace.learner.push")
_STORE_TIMEOUT = timedelta(seconds=30)
_MAX_ATTEMPTS = 8
_ANSWER_S = 60.0  # beyond the gateway's own clocks, for its answer


def store_host(address: str) -> str:
    """Host under which replicas reach this machine's rendezvous store, from the gateway's `host:port`; a wildcard becomes the machine's own address."""
    host = address.rsplit(":", 1)[0].strip("[]")
    if host not in ("", "0.0.0.0", "::", "*"):
        return host
    return socket.gethostbyname(socket.gethostname())


@dataclass(frozen=True, kw_only=True, slots=True)
class PushMetrics:
    """Of one rank since its start; `last_*` of the newest finished epoch."""

    num_pushed: int = 0  # epochs that ended without failure here, with at least one member
    num_failed: int = 0  # epochs that ended with an error here
    num_skipped: int = 0  # versions overtaken by a newer one before they began
    bytes_rooted: int = 0  # sent by this rank as the root, over all epochs
    peak_bytes: int = 0  # most bytes of buckets held at once
    last_version: int = 0
    last_seconds: float = 0.0
    last_error: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)  # phase name to number of members, over all epochs


class Pusher:
    """One rank's sender. `submit` never blocks; a version not yet begun is replaced by a newer one.

    Rank 0 hosts the rendezvous store on a free port. `deadline_s`: an epoch's sending gives up after this. `settle_s`: the gateway has settled
    the members of an epoch after this (collective_timeout_s for the ranks to come, prepare_s for the replicas to answer).
    """

    def __init__(
        self,
        *,
        address: str,
        incarnation: int,
        rank: int,
        world_size: int,
        device: torch.device,
        store_host: str,
        security: rpc.Security = rpc.OPEN,
        deadline_s: float = 300.0,
        settle_s: float = 60.0,
    ) -> None:
        self._begin_limit_s = max(rpc.deadline_s("BeginUpdate") or 0.0, settle_s + _ANSWER_S)
        self._end_limit_s = max(rpc.deadline_s("EndUpdate") or 0.0, deadline_s + _ANSWER_S)
        self._incarnation = incarnation
        self._rank = rank
        self._deadline_s = deadline_s
        self._channel = rpc.blocking_channel(address, security)
        self._feed = feed_pb2_grpc.FeedServiceStub(self._channel)
        self._store_host = store_host
        self._store = _host_store() if rank == 0 else None
        self._cancelled = threading.Event()
        self._sender = Sender(rank, device, self._cancelled)
        self._device_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        self._changed = threading.Condition()
        self._queued: tuple[int, OpenSnapshot] | None = None
        self._busy = False
        self._metrics = PushMetrics()
        self._outcomes: Counter[str] = Counter()
        del world_size  # the plan of each snapshot knows it
        self._thread = threading.Thread(target=self._run, name="weights-push", daemon=True)
        self._thread.start()

    def submit(self, version: int, snapshot: Snapshot) -> None:
        """Queues a version; opens the rank's file at once, so the snapshot may be removed later."""
        opened = OpenSnapshot(snapshot)
        with self._changed:
            if self._queued is not None:
                self._metrics = replace(self._metrics, num_skipped=self._metrics.num_skipped + 1)
            self._queued = (version, opened)
            self._changed.notify_all()

    def metrics(self) -> PushMetrics:
        """A copy of the numbers so far."""
        with self._changed:
            return replace(self._metrics, outcomes=dict(self._outcomes))

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything submitted was pushed or given up within timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued is None and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ends the thread, giving up a running epoch. True when it ended within timeout_s; the process may exit in either case."""
        self._cancelled.set()
        self._channel.close()  # ends a call that blocks
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._sender.close()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            version, snapshot = job
            try:
                self._push(version, snapshot)
            except Exception as error:  # supervised edge: one version's push is lost, counted and logged; training goes on
                self._failed(version, error)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> tuple[int, OpenSnapshot] | None:
        """The newest version; blocks; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued is not None or self._cancelled.is_set())
            if self._cancelled.is_set():
                return None
            job, self._queued = self._queued, None
            self._busy = True
            return job

    def _push(self, version: int, snapshot: OpenSnapshot) -> None:
        """Epochs of one version until the gateway is content. Raises grpc.RpcError when the gateway cannot be asked."""
        for attempt in range(_MAX_ATTEMPTS):
            begin = self._begin(version, attempt)
            if not begin.members:
                return
            end = self._feed.EndUpdate(self._send(version, snapshot, begin), timeout=self._end_limit_s)
            self._count(end.outcomes)
            if not end.retry or self._cancelled.is_set():
                return
            log.warning("version %d: epoch %d is tried again without those that failed", version, begin.epoch)

    def _begin(self, version: int, attempt: int) -> feed_pb2.BeginUpdateResponse:
        request = feed_pb2.BeginUpdateRequest(incarnation=self._incarnation, rank=self._rank, version=version, attempt=attempt, device_uuid=self._device_uuid)
        if self._store is not None:
            request.store_host, request.store_port = self._store_host, self._store.port
        answer: feed_pb2.BeginUpdateResponse = self._feed.BeginUpdate(request, timeout=self._begin_limit_s, wait_for_ready=True)
        return answer

    def _send(self, version: int, snapshot: OpenSnapshot, begin: feed_pb2.BeginUpdateResponse) -> feed_pb2.EndUpdateRequest:
        """One epoch's sending; its failure is part of the answer."""
        began, error = time.monotonic(), ""
        try:
            sent_bytes, peak_bytes = self._sender.send([begin.group, *begin.other_groups], version, snapshot, deadline_s=self._deadline_s)
        except TransferError as failure:
            sent_bytes, peak_bytes, error = self._sender.sent_bytes, self._sender.peak_bytes, str(failure)
            log.warning("version %d to %s: %s", version, ", ".join(begin.members), error)
        seconds = time.monotonic() - began
        with self._changed:
            old = self._metrics
            self._metrics = replace(
                old,
                num_pushed=old.num_pushed + (not error),
                num_failed=old.num_failed + bool(error),
                bytes_rooted=old.bytes_rooted + sent_bytes,
                peak_bytes=max(old.peak_bytes, peak_bytes),
                last_version=version,
                last_seconds=seconds,
                last_error=error,
            )
        return feed_pb2.EndUpdateRequest(
            incarnation=self._incarnation,
            rank=self._rank,
            epoch=begin.epoch,
            ok=not error,
            error=error,
            bytes_rooted=sent_bytes,
            peak_bytes=peak_bytes,
            seconds=seconds,
        )

    def _count(self, outcomes: Iterable[feed_pb2.MemberOutcome]) -> None:
        """Also what a replica said of its failure: the trainer's log and metrics have it, though the trainer goes on."""
        with self._changed:
            for outcome in outcomes:
                self._outcomes[learner_pb2.UpdatePhase.Name(outcome.phase).removeprefix("UPDATE_PHASE_").lower()] += 1
                if outcome.detail and outcome.phase not in (learner_pb2.UPDATE_PHASE_RECEIVED, learner_pb2.UPDATE_PHASE_LOADED):
                    said = f"replica {outcome.replica_id}: {outcome.detail}"
                    log.warning("version %d: %s", self._metrics.last_version, said)
                    self._metrics = replace(self._metrics, last_error=self._metrics.last_error or said)

    def _failed(self, version: int, error: Exception) -> None:
        self._sender.close()
        if self._cancelled.is_set():
            return
        text = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else f"{type(error).__name__}: {error}"
        log.error("version %d was not pushed: %s", version, text, exc_info=not isinstance(error, grpc.RpcError))
        with self._changed:
            self._metrics = replace(self._metrics, num_failed=self._metrics.num_failed + 1, last_version=version, last_error=text)


def _host_store() -> dist.TCPStore:
    """A rendezvous store on a free port (the server listens on all interfaces): bound once and kept, so nobody takes the port in between."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
