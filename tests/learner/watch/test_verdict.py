"""What holds a run back, told from its picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from learner.alarm_config import AlarmConfig
from learner.watch.picture import FIGURES, Picture, ReplicaPicture, picture_of
from learner.watch.verdict import causes
from learner.watch.window import Window, labels

REPLICA = ReplicaPicture(name="a", state="serving", stalled_s=0.0, idle_share=0.1, tokens_per_s=100.0, num_running=8, num_scoring=1)
WELL = Picture(
    over_s=120.0, waiting_share=0.1, drawing=8.0, scoring=1.0, unscored_share=0.0, sync_share=0.02, sync_s=0.005, disk_free_share=0.5, journal_full=False, failed_pushes=0.0,
    load_s=0.1, load_share=0.02, step_age_s=3.0, gpu_use=0.9, groups={"open": 4.0, "waiting": 1.0}, max_open=16.0, replicas=(REPLICA,),
)  # fmt: skip


def verdicts(**changes: Any) -> list[str]:
    return [cause.kind for cause in causes(replace(WELL, **changes), AlarmConfig())]


def with_replica(**changes: Any) -> dict[str, Any]:
    return {"replicas": (REPLICA, replace(REPLICA, name="b", **changes))}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "nothing stands out"),
        ({"waiting_share": 0.8}, "generation-bound"),
        ({"waiting_share": 0.8, "scoring": 12.0, "drawing": 2.0, "replicas": (replace(REPLICA, idle_share=0.6),)}, "reward-bound"),
        ({"waiting_share": 0.8, "scoring": 12.0, "drawing": 8.0}, "generation-bound"),  # long scores, but the engines are full: more scorers would not help
        ({"unscored_share": 0.3}, "reward-bound"),
        ({"replicas": (replace(REPLICA, idle_share=0.5),)}, "learner-bound"),
        ({"sync_s": 2.0, "sync_share": 0.9, "waiting_share": 0.9}, "disk"),
        ({"sync_s": 2.0, "sync_share": 0.1}, "nothing stands out"),  # slow, and hardly ever
        ({"disk_free_share": 0.01}, "disk"),
        ({"journal_full": True}, "disk"),
        ({"load_s": 20.0, "load_share": 0.7}, "network"),
        ({"failed_pushes": 0.05}, "network"),  # six in 120 s
        (with_replica(stalled_s=90.0), "stalled replica b"),
        (with_replica(stalled_s=90.0, state="gone"), "stalled replica b"),
        (with_replica(state="stale"), "stale replica b"),
    ],
)
def test_the_verdict_names_the_cause(changes: dict[str, Any], verdict: str) -> None:
    assert verdicts(**changes)[0] == verdict


def test_what_stops_work_comes_before_what_shares_it_and_both_are_told() -> None:
    assert verdicts(waiting_share=0.9, sync_s=1.0, sync_share=0.5, **with_replica(stalled_s=80.0)) == ["disk", "stalled replica b", "generation-bound"]


def test_every_cause_says_its_numbers_and_what_to_do() -> None:
    (cause, *_) = causes(replace(WELL, waiting_share=0.8, scoring=12.0, drawing=2.0, replicas=(replace(REPLICA, idle_share=0.6),)), AlarmConfig())
    assert "12.0 samples" in cause.why and "60%" in cause.why and "80%" in cause.why and "reward servers" in cause.do


def test_a_picture_is_read_off_the_figures() -> None:
    window = Window(dict.fromkeys(FIGURES, 60.0))
    for at_s in (0.0, 10.0):
        grown = at_s / 10
        window.add(at_s, {
            "headrace_gateway_batch_wait_seconds_total": {labels(): 4.0 * grown},
            "headrace_gateway_journal_syncs_total": {labels(): 100 + 20 * grown}, "headrace_gateway_journal_sync_seconds_total": {labels(): 5.0 * grown},
            "headrace_gateway_replica_drawing_seconds_total": {labels(replica="a"): 80.0 * grown, labels(replica="b"): 20.0 * grown},
            "headrace_gateway_replica_scorings_total": {labels(replica="a", outcome="scored"): 9 * grown, labels(replica="a", outcome="unscored"): 1 * grown},
            "headrace_gateway_replica_stalled_seconds": {labels(replica="a"): 0.0, labels(replica="b"): 33.0},
            "headrace_gateway_replica_state": {labels(replica="a", state="serving"): 1.0, labels(replica="a", state="stale"): 0.0},
            "headrace_gateway_replica_idle_seconds_total": {labels(replica="a"): 5.0 * grown},
            "headrace_gateway_disk_bytes": {labels(measure="free"): 30.0, labels(measure="size"): 120.0},
        })  # fmt: skip
    picture = picture_of(window, 60.0)
    assert (picture.waiting_share, picture.sync_s, picture.sync_share, picture.drawing, picture.unscored_share, picture.disk_free_share) == pytest.approx((0.4, 0.25, 0.5, 10.0, 0.1, 0.25))
    assert [(one.name, one.state, one.stalled_s, one.idle_share) for one in picture.replicas] == [("a", "serving", 0.0, 0.5), ("b", "gone", 33.0, None)]
    assert picture.scoring is None and picture.load_s is None
