"""What the gateway knows of each replica: its claim, its last heartbeat, and how its weight updates went."""

from __future__ import annotations

from dataclasses import dataclass

from learner.gateway.handshake import Claim

LOST_TOLD_S = 1800.0  # for so long a replica that left without a goodbye counts as stalled

FAILURES_BEFORE_LEFT_OUT = 2

STARTING, WAITING, SERVING, STALE, DRAINING = 1, 2, 3, 4, 5  # values of ReplicaState on the wire


def holder_of(replica_id: str, incarnation: int) -> str:
    """Name under which leases know one life of a replica."""
    return f"{replica_id}@{incarnation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSeen:
    """A GPU as its replica told. Example: `GpuSeen(index="0", uuid="GPU-5f", use=0.9, used_bytes=1 << 36, size_bytes=1 << 37, power_w=600.0)`"""

    index: str
    uuid: str
    use: float  # 0 to 1
    used_bytes: int
    size_bytes: int
    power_w: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a heartbeat tells of the samples of a replica. Example: `Load(num_scoring=3, drawing_s=12.0, scoring_s=40.0, num_scored=9, num_unscored=0, num_drawn=288, gpus=())`"""

    num_scoring: int
    drawing_s: float
    scoring_s: float
    num_scored: int
    num_unscored: int
    num_drawn: int
    gpus: tuple[GpuSeen, ...]


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
    num_scoring: int = 0  # samples that wait for their score now
    drawing_s: float = 0.0  # of samples at the engine, summed over them, since its start
    scoring_s: float = 0.0  # of samples that waited for their score, likewise
    num_scored: int = 0  # samples since its start
    num_unscored: int = 0
    gpus: tuple[GpuSeen, ...] = ()
    moved_s: float = 0.0  # event-loop time at which it last had no request, or had drawn another token
    num_drawn: int = 0  # tokens, handed out or not
    lost: bool = False  # its stream ended without a goodbye, and it has not come back
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

    def loaded_with(self, load: Load, now_s: float) -> None:
        """The rest of a heartbeat, after `heartbeat`. What an update or a start holds up is no stall: then it is not SERVING."""
        if self.num_running == 0 or self.state != SERVING or load.num_drawn != self.num_drawn:
            self.moved_s = now_s
        self.num_scoring, self.drawing_s, self.scoring_s = load.num_scoring, load.drawing_s, load.scoring_s
        self.num_scored, self.num_unscored, self.num_drawn, self.gpus = load.num_scored, load.num_unscored, load.num_drawn, load.gpus

    def stalled_s(self, now_s: float) -> float | None:
        """For how long it has owed tokens, or a word; None for one that left in good order, or was lost long ago."""
        if not self.attending and (not self.lost or now_s - self.heard_s > LOST_TOLD_S):
            return None
        return max(0.0, now_s - min(self.heard_s, self.moved_s or self.heard_s))

    def update_failed(self, detail: str) -> None:
        """An epoch failed and this replica is blamed for it."""
        self.failures_in_row += 1
        self.detail = detail
        if self.left_out:
            self.detail = f"quarantined: left out of pushes after {self.failures_in_row} failures in a row, it fetches instead; last: {detail}"

    def update_succeeded(self) -> None:
        self.failures_in_row = 0
        self.detail = ""
