"""The alarms: a condition over the gateway's figures, how long it must hold, and what it is called. docs/operating.md has a section on each.

The gateway evaluates them on its own figures (lookout.py), and Prometheus the same ones from the rules made of this table
(deploy/prometheus/generate.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from learner.alarm_config import AlarmConfig
from learner.watch.expressions import And, By, Expression, Is, Mean, Now, Or, Over, Rate, Times
from learner.watch.window import Labels

GATEWAY, TRAINER = "headrace_gateway_", "headrace_trainer_"
MIN_PEERS = 3  # GPUs of a kind, below which none is compared with the others
BUSY_USE = 0.2  # median use of a kind of GPU, below which all of them idle and none stands out


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """One alarm. Example: `ALARMS["HeadraceNoStep"].words({}, 1900.0)` is "no version was published for 31.7 min"."""

    name: str
    severity: Literal["info", "warning", "critical"]
    text: str  # {value}, {value:%} a share, {value:s} a time; {label} of the series that it fires for
    hold_s: float  # its condition must hold for so long; times patience
    condition: Callable[[AlarmConfig], Expression]

    def words(self, labels: dict[str, str], value: float) -> str:
        """What it says of one series."""
        written = {"%": f"{value:.1%}", "s": f"{value:.0f} s" if value < 120 else f"{value / 60:.1f} min", "": f"{value:.3g}"}
        text = re.sub(r"\{value:?([%s]?)\}", lambda found: written[found[1]], self.text)
        return re.sub(r"\{(\w+)\}", lambda found: labels.get(found[1], "?"), text)

    def template(self) -> str:
        """The same for Prometheus' annotations."""
        written = {"%": "{{ $value | humanizePercentage }}", "s": "{{ $value | humanizeDuration }}", "": '{{ $value | printf "%.3g" }}'}
        text = re.sub(r"\{(?!value)(\w+)\}", r"{{ $labels.\1 }}", self.text)
        return re.sub(r"\{value:?([%s]?)\}", lambda found: written[found[1]], text)


def _five_minutes(config: AlarmConfig) -> float:
    return 300.0 * config.patience


def _no_step(config: AlarmConfig) -> Expression:
    return Is(of=Now(name=GATEWAY + "step_age_seconds"), op=">", than=60 * config.no_step_minutes)


def _low_use(config: AlarmConfig) -> Expression:
    return Is(of=Now(name=GATEWAY + "low_use_steps"), op=">=", than=float(config.low_use_steps))


def _below_peers(config: AlarmConfig) -> Expression:
    def of(name: str) -> Expression:
        use = Mean(name=name, over_s=_five_minutes(config))
        many = And(of=Is(of=By(of=use, how="median"), op=">", than=BUSY_USE), where=Is(of=By(of=use, how="count"), op=">=", than=float(MIN_PEERS)))
        return And(of=Is(of=use, op="<", than=Times(factor=config.peer_share, of=By(of=use, how="median"))), where=many)

    return Or(of=of(GATEWAY + "gpu_use_ratio"), other=of(GATEWAY + "replica_gpu_use_ratio"))


def _at_bound(config: AlarmConfig) -> Expression:
    bound = Now(name=GATEWAY + "staleness_bound_steps")
    idle = Is(of=Now(name=TRAINER + "idle_ratio", match=(("side", "replicas"),)), op=">", than=config.idle_share)
    at_bound = Is(of=Now(name=TRAINER + "staleness_max_steps"), op=">=", than=bound)
    busy = Is(of=Rate(name=GATEWAY + "batch_wait_seconds_total", over_s=_five_minutes(config)), op="<", than=config.waiting_share)
    return And(of=And(of=And(of=at_bound, where=Is(of=bound, op=">", than=0.0)), where=idle), where=busy)


def _stale(_: AlarmConfig) -> Expression:
    return Is(of=Now(name=GATEWAY + "replica_state", match=(("state", "stale"),)), op="==", than=1.0)


def _stalled(config: AlarmConfig) -> Expression:
    return Is(of=Now(name=GATEWAY + "replica_stalled_seconds"), op=">", than=config.stalled_s)


def _unscored(config: AlarmConfig) -> Expression:
    name, over_s = GATEWAY + "replica_scorings_total", _five_minutes(config)
    return Is(of=Over(of=By(of=Rate(name=name, over_s=over_s, match=(("outcome", "unscored"),)), how="sum"), by=By(of=Rate(name=name, over_s=over_s), how="sum")), op=">", than=config.unscored_share)


def _slow_reward(config: AlarmConfig) -> Expression:
    over_s = _five_minutes(config)
    scoring, drawing = (By(of=Rate(name=f"{GATEWAY}replica_{what}_seconds_total", over_s=over_s), how="sum") for what in ("scoring", "drawing"))
    waits = Is(of=Rate(name=GATEWAY + "batch_wait_seconds_total", over_s=over_s), op=">", than=config.waiting_share)
    idle = Is(of=By(of=Rate(name=GATEWAY + "replica_idle_seconds_total", over_s=over_s), how="avg"), op=">", than=config.idle_share)
    return And(of=And(of=Is(of=scoring, op=">", than=drawing), where=waits), where=idle)


def _kl_jump(config: AlarmConfig) -> Expression:
    newest = Now(name=TRAINER + "kl_nats")
    before = Mean(name=TRAINER + "kl_nats", over_s=3600.0 * config.patience, ago_s=_five_minutes(config))
    return And(of=Is(of=newest, op=">", than=config.kl_floor), where=Is(of=newest, op=">", than=Times(factor=config.kl_times, of=before)))


def _disk_slow(config: AlarmConfig) -> Expression:
    over_s = _five_minutes(config)
    return Is(of=Over(of=Rate(name=GATEWAY + "journal_sync_seconds_total", over_s=over_s), by=Rate(name=GATEWAY + "journal_syncs_total", over_s=over_s)), op=">", than=config.sync_s)


def _disk_full(config: AlarmConfig) -> Expression:
    free, size = (Now(name=GATEWAY + "disk_bytes", match=(("measure", measure),)) for measure in ("free", "size"))
    return Is(of=Over(of=free, by=size), op="<", than=config.disk_free_share)


def _journal_full(_: AlarmConfig) -> Expression:
    return Is(of=Now(name=GATEWAY + "alarms"), op="==", than=1.0)


_TABLE = (
    Alarm(name="HeadraceNoStep", severity="critical", text="no version was published for {value:s}", hold_s=60.0, condition=_no_step),
    Alarm(name="HeadraceLowGpuUse", severity="warning", text="{value} steps in a row with the learner's GPUs used less than they should be", hold_s=0.0, condition=_low_use),
    Alarm(name="HeadraceGpuBelowPeers", severity="warning", text="GPU {gpu} ({uuid}) is at {value:%}, far below the others of its kind", hold_s=600.0, condition=_below_peers),
    Alarm(name="HeadraceStalenessAtBound", severity="info", text="tokens are as old as the bound of {value} steps allows, replicas are idle and the trainer is not", hold_s=600.0, condition=_at_bound),
    Alarm(name="HeadraceReplicaStale", severity="critical", text="replica {replica} is STALE and serves nothing", hold_s=300.0, condition=_stale),
    Alarm(name="HeadraceReplicaStalled", severity="critical", text="replica {replica} has requests and drew no token, or was not heard of, for {value:s}", hold_s=0.0, condition=_stalled),
    Alarm(name="HeadraceRewardErrors", severity="warning", text="{value:%} of the samples get no score", hold_s=300.0, condition=_unscored),
    Alarm(name="HeadraceRewardSlow", severity="warning", text="{value} samples at a time wait for their score, more than are being drawn, and the trainer waits for them", hold_s=300.0, condition=_slow_reward),
    Alarm(name="HeadraceKlJump", severity="warning", text="KL from engine to learner is {value} nats, many times that of the hour before", hold_s=0.0, condition=_kl_jump),
    Alarm(name="HeadraceDiskSlow", severity="warning", text="a sync of the journal takes {value} s in the mean", hold_s=120.0, condition=_disk_slow),
    Alarm(name="HeadraceDiskNearlyFull", severity="critical", text="{value:%} of the run folder's disk is free", hold_s=60.0, condition=_disk_full),
    Alarm(name="HeadraceJournalFull", severity="critical", text="training waits: the journal is full and no cut can be made", hold_s=60.0, condition=_journal_full),
)  # fmt: skip
ALARMS = {alarm.name: alarm for alarm in _TABLE}


def series_labels(key: Labels) -> dict[str, str]:
    """A series' labels as a mapping."""
    return dict(sorted(key))
