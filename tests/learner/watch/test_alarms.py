"""Every alarm on figures made by hand, evaluated by the gateway's own rules and by Prometheus from the rules that are made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.prometheus.generate import FILE, rules
from learner.alarm_config import AlarmConfig
from learner.watch.alarms import ALARMS
from learner.watch.firing import Alarms
from learner.watch.window import Window, labels
from tests.prometheus_server import promtool

STEP_S = 15.0
GATEWAY, TRAINER = "headrace_gateway_", "headrace_trainer_"
Series = dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]


def of(name: str, **given: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(given.items())


def steady(value: float, minutes: float) -> list[float]:
    return [value] * (int(minutes * 60 / STEP_S) + 1)


def rising(per_s: float, minutes: float) -> list[float]:
    return [per_s * STEP_S * index for index in range(int(minutes * 60 / STEP_S) + 1)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """At which minutes an alarm does not fire yet, and at which it does."""

    alarm: str
    series: Series
    quiet_at: tuple[float, ...] = ()
    fires_at: tuple[float, ...] = ()
    series_labels: list[dict[str, str]] = field(default_factory=lambda: [{}])  # of those that fire


def gpus(name: str, uses: list[float], **more: str) -> Series:
    return {of(name, **more, gpu=str(index), uuid=f"GPU-{index}"): steady(use, 25) for index, use in enumerate(uses)}


def scorings(unscored: float) -> Series:
    return {of(GATEWAY + "replica_scorings_total", replica=name, outcome=outcome): rising(rate, 15) for name in "ab" for outcome, rate in (("scored", 1 - unscored), ("unscored", unscored))}


def slow_reward(scoring: float, drawing: float, waits: float, idle: float) -> Series:
    return {
        of(GATEWAY + "replica_scoring_seconds_total", replica="a"): rising(scoring, 15), of(GATEWAY + "replica_drawing_seconds_total", replica="a"): rising(drawing, 15),
        of(GATEWAY + "batch_wait_seconds_total"): rising(waits, 15), of(GATEWAY + "replica_idle_seconds_total", replica="a"): rising(idle, 15),
    }  # fmt: skip


def at_bound(bound: float, oldest: float, idle: float, waits: float = 0.1) -> Series:
    return {of(GATEWAY + "batch_wait_seconds_total"): rising(waits, 15), of(GATEWAY + "staleness_bound_steps"): steady(bound, 15), of(TRAINER + "staleness_max_steps"): steady(oldest, 15), of(TRAINER + "idle_ratio", side="replicas"): steady(idle, 15), of(TRAINER + "idle_ratio", side="trainer"): steady(0.9, 15)}


def kl(before: float, after: float) -> Series:
    return {of(TRAINER + "kl_nats"): steady(before, 90) + steady(after, 4)}


def syncs(seconds: float) -> Series:
    return {of(GATEWAY + "journal_sync_seconds_total"): rising(2 * seconds, 10), of(GATEWAY + "journal_syncs_total"): rising(2, 10)}


def disk(free: float) -> Series:
    return {of(GATEWAY + "disk_bytes", measure="free"): steady(free, 5), of(GATEWAY + "disk_bytes", measure="size"): steady(100.0, 5)}


CASES = [
    Case(alarm="HeadraceNoStep", series={of(GATEWAY + "step_age_seconds"): rising(1, 35)}, quiet_at=(25, 30.5), fires_at=(31.5, 34)),  # over 1800 s from minute 30.25 on, for a minute
    Case(alarm="HeadraceLowGpuUse", series={of(GATEWAY + "low_use_steps"): steady(4, 2) + steady(5, 2)}, quiet_at=(2,), fires_at=(3,)),
    Case(alarm="HeadraceGpuBelowPeers", series=gpus(GATEWAY + "gpu_use_ratio", [0.9, 0.8, 0.3, 0.9]), quiet_at=(9,), fires_at=(11,), series_labels=[{"gpu": "2", "uuid": "GPU-2"}]),  # median 0.85; half 0.425
    Case(alarm="HeadraceGpuBelowPeers", series=gpus(GATEWAY + "gpu_use_ratio", [0.9, 0.8, 0.5, 0.9]), quiet_at=(11, 20)),
    Case(alarm="HeadraceGpuBelowPeers", series=gpus(GATEWAY + "gpu_use_ratio", [0.9, 0.1]), quiet_at=(20,)),  # two of a kind: who is to say which is right
    Case(alarm="HeadraceGpuBelowPeers", series=gpus(GATEWAY + "gpu_use_ratio", [0.1, 0.15, 0.01]), quiet_at=(20,)),  # all of them idle
    Case(alarm="HeadraceGpuBelowPeers", series=gpus(GATEWAY + "gpu_use_ratio", [0.2, 0.2, 0.2]) | gpus(GATEWAY + "replica_gpu_use_ratio", [0.9, 0.9, 0.4], replica="a"), fires_at=(20,), series_labels=[{"replica": "a", "gpu": "2", "uuid": "GPU-2"}]),
    Case(alarm="HeadraceStalenessAtBound", series=at_bound(2, 2, 0.3), quiet_at=(9,), fires_at=(11,)),
    Case(alarm="HeadraceStalenessAtBound", series=at_bound(2, 1, 0.3), quiet_at=(11,)),
    Case(alarm="HeadraceStalenessAtBound", series=at_bound(2, 2, 0.3, waits=0.9), quiet_at=(14,)),  # both wait: for the reward, or the disk
    Case(alarm="HeadraceStalenessAtBound", series=at_bound(2, 2, 0.1), quiet_at=(11,)),
    Case(alarm="HeadraceStalenessAtBound", series=at_bound(0, 0, 0.5), quiet_at=(11,)),  # a synchronous run is at its bound by design
    Case(alarm="HeadraceReplicaStale", series={of(GATEWAY + "replica_state", replica=name, state=state): steady(float((name, state) in (("a", "stale"), ("b", "serving"))), 8) for name in "ab" for state in ("serving", "stale")}, quiet_at=(4,), fires_at=(6,), series_labels=[{"replica": "a", "state": "stale"}]),
    Case(alarm="HeadraceReplicaStalled", series={of(GATEWAY + "replica_stalled_seconds", replica="a"): rising(1, 3), of(GATEWAY + "replica_stalled_seconds", replica="b"): steady(0, 3)}, quiet_at=(1,), fires_at=(1.25, 3), series_labels=[{"replica": "a"}]),
    Case(alarm="HeadraceRewardErrors", series=scorings(0.06), quiet_at=(4,), fires_at=(6,)),
    Case(alarm="HeadraceRewardErrors", series=scorings(0.04), quiet_at=(12,)),
    Case(alarm="HeadraceRewardErrors", series={key: steady(7, 15) for key in scorings(0.5)}, quiet_at=(12,)),  # nothing is being scored
    Case(alarm="HeadraceRewardSlow", series=slow_reward(3, 1, 0.8, 0.6), quiet_at=(7,), fires_at=(9,)),  # a young counter rises slowly: 0.8 of the time is over 0.5 of five minutes after 3.1
    Case(alarm="HeadraceRewardSlow", series=slow_reward(3, 1, 0.3, 0.6), quiet_at=(12,)),  # nobody waits for it
    Case(alarm="HeadraceRewardSlow", series=slow_reward(3, 4, 0.8, 0.6), quiet_at=(12,)),  # drawing takes longer
    Case(alarm="HeadraceRewardSlow", series=slow_reward(8, 4, 0.8, 0.0), quiet_at=(12,)),  # the engines have enough to do: generation is the limit
    Case(alarm="HeadraceKlJump", series=kl(0.004, 0.03), quiet_at=(89,), fires_at=(91,)),
    Case(alarm="HeadraceKlJump", series=kl(0.001, 0.009), quiet_at=(91,)),  # nine times as much, and still little
    Case(alarm="HeadraceKlJump", series=kl(0.01, 0.04), quiet_at=(91,)),
    Case(alarm="HeadraceDiskSlow", series=syncs(0.6), quiet_at=(1,), fires_at=(3, 8)),
    Case(alarm="HeadraceDiskSlow", series=syncs(0.4), quiet_at=(8,)),
    Case(alarm="HeadraceDiskNearlyFull", series=disk(4), quiet_at=(0.5,), fires_at=(2,), series_labels=[{"measure": "free"}]),
    Case(alarm="HeadraceDiskNearlyFull", series=disk(6), quiet_at=(2,)),
    Case(alarm="HeadraceJournalFull", series={of(GATEWAY + "alarms"): steady(1, 3)}, quiet_at=(0.5,), fires_at=(2,)),
]  # fmt: skip


def by_our_rules(case: Case, config: AlarmConfig) -> dict[float, list[dict[str, str]]]:
    """Labels of the series that fire, by minute."""
    alarms = Alarms([ALARMS[case.alarm]], config)
    window, found = Window(alarms.horizons_s()), {}
    for index in range(max(map(len, case.series.values()))):
        reading: dict[str, Any] = {}
        for (name, given), values in case.series.items():
            if index < len(values):
                reading.setdefault(name, {})[labels(**dict(given))] = values[index]
        window.add(index * STEP_S, reading)
        alarms.look(window)
        found[index * STEP_S / 60] = [fire.labels for fire in alarms.firing.values()]
    return found


def test_every_alarm_has_a_case_in_which_it_fires() -> None:
    assert {case.alarm for case in CASES if case.fires_at} == set(ALARMS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alarm)
def test_the_gateway_finds_it(case: Case) -> None:
    found = by_our_rules(case, AlarmConfig(every_s=STEP_S))
    assert all(not found[minute] for minute in case.quiet_at), found
    assert all(found[minute] == case.series_labels for minute in case.fires_at), found


def test_prometheus_finds_the_same(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(FILE.read_text())
    tests = []
    for case in CASES:
        series = [{"series": name + "{" + ",".join(f'{key}="{value}"' for key, value in (("run", "first"), *given)) + "}", "values": " ".join(map(str, values))} for (name, given), values in case.series.items()]
        severity = ALARMS[case.alarm].severity
        quiet = [{"eval_time": f"{60 * minute:.0f}s", "alertname": case.alarm, "exp_alerts": []} for minute in case.quiet_at]
        # annotations have values in them, which are compared below; here what fires
        fires = [{"expr": f'ALERTS{{alertname="{case.alarm}",alertstate="firing"}}', "eval_time": f"{60 * minute:.0f}s", "exp_samples": [{"labels": "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in (("alertname", case.alarm), ("alertstate", "firing"), ("run", "first"), ("severity", severity), *more.items())) + "}", "value": 1} for more in case.series_labels]} for minute in case.fires_at]
        tests.append({"interval": f"{STEP_S:.0f}s", "input_series": series, "alert_rule_test": quiet, "promql_expr_test": fires})
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": f"{STEP_S:.0f}s", "tests": tests}))
    promtool("test", "rules", str(file))


def test_the_rules_file_is_what_the_table_makes() -> None:
    assert FILE.read_text() == rules(AlarmConfig()), "run python -m deploy.prometheus.generate"


@pytest.mark.parametrize("config", [AlarmConfig(), AlarmConfig(patience=0.05, no_step_minutes=0.75, kl_times=2.5, peer_share=0.25, stalled_s=12.5)], ids=["defaults", "changed"])
def test_promtool_accepts_the_rules_of_any_run(config: AlarmConfig, tmp_path: Path) -> None:
    file = tmp_path / "rules.yml"
    file.write_text(rules(config))
    assert f"{len(ALARMS) + 1} rules found" in promtool("check", "rules", str(file))


def test_thresholds_of_a_run_stand_in_its_rules() -> None:
    made = {rule["alert"]: rule for rule in yaml.safe_load(rules(AlarmConfig(patience=0.1, no_step_minutes=2, sync_s=0.25, stalled_s=15)))["groups"][0]["rules"]}
    assert made["HeadraceNoStep"]["expr"] == "(headrace_gateway_step_age_seconds > 120)" and made["HeadraceNoStep"]["for"] == "6s"
    assert "[30s]" in made["HeadraceDiskSlow"]["expr"] and made["HeadraceDiskSlow"]["expr"].endswith("> 0.25)")
    assert made["HeadraceReplicaStalled"]["expr"].endswith("> 15)")


def test_patience_shortens_what_the_gateway_waits_for_as_well() -> None:
    case = next(case for case in CASES if case.alarm == "HeadraceRewardSlow" and case.fires_at)
    found = by_our_rules(case, AlarmConfig(every_s=STEP_S, patience=0.2))  # a minute in place of five
    assert not found[1.5] and found[2.0] == [{}]  # a fifth of the above


def test_words_say_the_series_and_the_value() -> None:
    assert ALARMS["HeadraceReplicaStalled"].words({"replica": "a"}, 75.0) == "replica a has requests and drew no token, or was not heard of, for 75 s"
    assert ALARMS["HeadraceDiskNearlyFull"].words({}, 0.0421) == "4.2% of the run folder's disk is free"
    assert ALARMS["HeadraceNoStep"].words({}, 1860.0) == "no version was published for 31.0 min"
    assert ALARMS["HeadraceGpuBelowPeers"].template() == "GPU {{ $labels.gpu }} ({{ $labels.uuid }}) is at {{ $value | humanizePercentage }}, far below the others of its kind"
