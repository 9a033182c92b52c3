"""Sends published versions to the replicas while the trainer trains on: one background thread a rank.

    pusher = Pusher(address=gateway, incarnation=ns, rank=r, world_size=n, device=torch.device("cpu"), store_host=store_host(config.address))
    pusher.submit(version, snapshot)     # every rank, after CloseBatch; returns at once
    row["push"] = pusher.metrics()
    pusher.close(timeout_s=30.0)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from learner.weights.snapshot import Snapshot
from protos import rpc


def store_host(address: str) -> str:
    """Host under which replicas reach this machine's rendezvous store, from the gateway's `host:port`; a wildcard becomes the machine's own address."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class PushMetrics:
    """Of one rank since its start; `last_*` of the newest finished epoch."""

    num_pushed: int = 0  # versions whose last epoch ended without failure
    num_failed: int = 0  # epochs that ended with an error here
    num_skipped: int = 0  # versions overtaken by a newer one
    bytes_rooted: int = 0  # sent by this rank as the root, over all epochs
    peak_bytes: int = 0  # most bytes of buckets held at once
    last_version: int = 0
    last_seconds: float = 0.0
    last_error: str = ""
    outcomes: dict[str, int] = field(default_factory=dict)  # phase name to number of members


class Pusher:
    """One rank's sender. `submit` never blocks; a version not yet begun is replaced by a newer one."""

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
    ) -> None:
        raise NotImplementedError

    def submit(self, version: int, snapshot: Snapshot) -> None:
        """Queues a version; opens the rank's file at once, so the snapshot may be removed later."""
        raise NotImplementedError

    def metrics(self) -> PushMetrics:
        raise NotImplementedError

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything submitted was pushed or given up within timeout_s."""
        raise NotImplementedError

    def close(self, timeout_s: float) -> bool:
        """Ends the thread, giving up a running epoch. True when it ended within timeout_s; the process may exit in either case."""
        raise NotImplementedError
