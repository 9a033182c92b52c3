"""What the gateway knows of each replica: its claim, its last heartbeat, and how its weight updates went."""

from __future__ import annotations

from dataclasses import dataclass

from learner.gateway.handshake import Claim

FAILURES_BEFORE_LEFT_OUT = 2

STARTING, WAITING, SERVING, STALE, DRAINING = 1, 2, 3, 4, 5  # values of ReplicaState on the wire


def holder_of(replica_id: str, incarnation: int) -> str:
    """Name under which leases know one life of a replica."""
    return f"{replica_id}@{incarnation}"


@dataclass(kw_only=True, slots=True)
class Replica:
    """One replica_id in its newest life. Mutable: attendance.py owns it.

    Example: `Replica(claim=claim, heard_s=12.5, attending=True)`.
    """

    claim: Claim
    heard_s: float  # event-loop time of its last message
    attending: bool
    state: int = WAITING
    loaded_version: int = 0
    num_running: int = 0
    num_free: int = 0
    num_tokens: int = 0  # drawn since its start
    idle_s: float = 0.0  # since its start
    detail: str = ""  # last failure; empty: none
    left_in_order: bool = False  # it said goodbye
    failures_in_row: int = 0  # epochs that failed for it, one after another

    @property
    def member(self) -> tuple[str, int]:
        return self.claim.replica_id, self.claim.incarnation

    @property
    def may_lease(self) -> bool:
        """Whether it samples from a version of this run."""
        return self.attending and self.loaded_version > 0 and self.state not in (STARTING, STALE, DRAINING)

    @property
    def left_out(self) -> bool:
        """Whether it failed too often to be waited for in an epoch; it still fetches."""
        return self.failures_in_row >= FAILURES_BEFORE_LEFT_OUT

    def heartbeat(self, *, state: int, loaded_version: int, num_running: int, num_free: int, num_tokens: int, idle_s: float) -> None:
        self.state, self.loaded_version = state, loaded_version
        self.num_running, self.num_free = num_running, num_free
        self.num_tokens, self.idle_s = num_tokens, idle_s

    def update_failed(self, detail: str) -> None:
        """An epoch failed and this replica is blamed for it."""
        self.failures_in_row += 1
        self.detail = detail
        if self.left_out:
            self.detail = f"quarantined: left out of pushes after {self.failures_in_row} failures in a row, it fetches instead; last: {detail}"

    def update_succeeded(self) -> None:
        self.failures_in_row = 0
        self.detail = ""
