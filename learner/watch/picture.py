"""Where a run's time went in the last while, as numbers: what the verdict is made of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from learner.watch.window import Labels, Vector, Window

_GATEWAY = "headrace_gateway_"
OVER_S = 120.0  # looked back; times patience
FIGURES = tuple(
    _GATEWAY + name
    for name in (
        "batch_wait_seconds_total", "journal_sync_seconds_total", "journal_syncs_total", "load_seconds_total", "loads_total", "push_replicas_total",
        "replica_drawing_seconds_total", "replica_idle_seconds_total", "replica_running_requests", "replica_scoring_samples", "replica_scoring_seconds_total",
        "replica_scorings_total", "replica_stalled_seconds", "replica_state", "replica_tokens_total", "disk_bytes", "alarms", "step_age_seconds", "groups",
        "max_open_groups", "step_gpu_use_ratio",
    )
)  # fmt: skip
FAILED_PHASES = ("failed", "lost", "unheard")  # of a replica in a push


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPicture:
    """One replica. Example: a replica that idles: `idle_share=0.9`"""

    name: str
    state: str  # serving, stale, ...; "gone" for one that does not attend
    stalled_s: float  # since it drew a token, had nothing to draw, or was heard of
    idle_share: float | None  # of the time, without any request; None: not known yet
    tokens_per_s: float | None
    num_running: int  # requests at its engine
    num_scoring: int  # samples that wait for their score


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A run in its last while. Shares and rates are None where two readings of them do not exist yet."""

    over_s: float
    waiting_share: float | None  # of the time, in which the trainer waited for a batch
    drawing: float | None  # samples at engines, in the mean
    scoring: float | None  # samples that waited for their score, in the mean
    unscored_share: float | None  # of the samples answered
    sync_share: float | None  # of the time, in which the journal waited for its disk
    sync_s: float | None  # of one sync, in the mean
    disk_free_share: float | None
    journal_full: bool
    failed_pushes: float  # replicas a second for which a push failed
    load_s: float | None  # of one transfer of weights, in the mean
    load_share: float | None  # of the time, in which a replica was being given weights, in the mean over replicas
    step_age_s: float | None
    gpu_use: float | None  # of the learner's GPUs in the newest step
    groups: Mapping[str, float]  # by state
    max_open: float | None
    replicas: tuple[ReplicaPicture, ...]

    @property
    def idle_share(self) -> float | None:
        """Mean over the replicas that tell."""
        shares = [replica.idle_share for replica in self.replicas if replica.idle_share is not None]
        return sum(shares) / len(shares) if shares else None


def picture_of(window: Window, over_s: float) -> Picture:
    """Of a window that keeps FIGURES for over_s."""

    def one(vector: Vector) -> float | None:
        return sum(vector.values()) if vector else None

    def rate(name: str) -> Vector:
        return window.speed(_GATEWAY + name, over_s)

    scorings, syncs, sync_rate = rate("replica_scorings_total"), one(rate("journal_syncs_total")), one(rate("journal_sync_seconds_total"))
    answered, loads, load_rate = one(scorings), one(rate("loads_total")), one(rate("load_seconds_total"))
    disk = {_of(key, "measure"): value for key, value in window.newest(_GATEWAY + "disk_bytes").items()}
    replicas = _replicas(window, over_s)
    return Picture(
        over_s=over_s,
        waiting_share=one(rate("batch_wait_seconds_total")),
        drawing=one(rate("replica_drawing_seconds_total")),
        scoring=one(rate("replica_scoring_seconds_total")),
        unscored_share=_quotient(one({key: value for key, value in scorings.items() if _of(key, "outcome") == "unscored"}) or 0.0, answered),
        sync_share=sync_rate,
        sync_s=_quotient(sync_rate, syncs),
        disk_free_share=_quotient(disk.get("free"), disk.get("size")),
        journal_full=bool(one(window.newest(_GATEWAY + "alarms"))),
        failed_pushes=sum(value for key, value in rate("push_replicas_total").items() if _of(key, "outcome") in FAILED_PHASES),
        load_s=_quotient(load_rate, loads),
        load_share=_quotient(load_rate, float(len(replicas))),
        step_age_s=one(window.newest(_GATEWAY + "step_age_seconds")),
        gpu_use=one(window.newest(_GATEWAY + "step_gpu_use_ratio")),
        groups={_of(key, "state"): value for key, value in window.newest(_GATEWAY + "groups").items()},
        max_open=one(window.newest(_GATEWAY + "max_open_groups")),
        replicas=replicas,
    )


def _replicas(window: Window, over_s: float) -> tuple[ReplicaPicture, ...]:
    def by_name(vector: Vector) -> dict[str, float]:
        return {_of(key, "replica"): value for key, value in vector.items()}

    stalled = by_name(window.newest(_GATEWAY + "replica_stalled_seconds"))
    states = {_of(key, "replica"): _of(key, "state") for key, value in window.newest(_GATEWAY + "replica_state").items() if value}
    idle = by_name(window.speed(_GATEWAY + "replica_idle_seconds_total", over_s))
    tokens = by_name(window.speed(_GATEWAY + "replica_tokens_total", over_s))
    running = by_name(window.newest(_GATEWAY + "replica_running_requests"))
    scoring = by_name(window.newest(_GATEWAY + "replica_scoring_samples"))
    return tuple(
        ReplicaPicture(
            name=name, state=states.get(name, "gone"), stalled_s=stalled.get(name, 0.0), idle_share=idle.get(name), tokens_per_s=tokens.get(name),
            num_running=int(running.get(name, 0)), num_scoring=int(scoring.get(name, 0)),
        )
        for name in sorted({*stalled, *states})
    )  # fmt: skip


def _of(key: Labels, name: str) -> str:
    return dict(key).get(name, "")


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
