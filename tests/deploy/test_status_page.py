"""The page of `headrace status --watch`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from rich.console import Console
from rich.terminal_theme import MONOKAI

from deploy import watching
from deploy.mistakes import Mistakes
from deploy.status_page import page, spark
from protos.learner.v1alpha1 import learner_pb2
from protos.rollout.v1alpha1 import rollout_pb2
from tests.system.status_picture import CELL, draw


def a_status(**changes: Any) -> learner_pb2.GetStatusResponse:
    replicas = [
        learner_pb2.GetStatusResponse.Replica(replica_id="rollout-0", state=rollout_pb2.REPLICA_STATE_SERVING, loaded_version=12, num_running=16, num_leases=4, silent_s=0.3, attending=True, num_tokens=123456),
        learner_pb2.GetStatusResponse.Replica(replica_id="rollout-1", state=rollout_pb2.REPLICA_STATE_STALE, loaded_version=10, attending=True, silent_s=7.0, num_tokens=99, detail="FAILED in apply"),
        learner_pb2.GetStatusResponse.Replica(replica_id="rollout-2", state=rollout_pb2.REPLICA_STATE_SERVING, loaded_version=3, attending=False, silent_s=900),
    ]  # fmt: skip
    given = {
        "run_id": "r1", "run_dir": "/runs/first", "policy_step": 12, "newest_version": 12, "lineage": 1, "replicas": replicas, "num_leased": 60, "num_trained": 48, "num_open": 8,
        "num_dropped": {"zero_signal": 4}, "max_open": 16, "max_staleness": 1, "trained_tokens_by_staleness": {0: 300, 1: 100}, "num_waiting": 2,
    }  # fmt: skip
    return learner_pb2.GetStatusResponse(**{**given, **changes})


def a_step(step: int) -> dict[str, Any]:
    return {
        "step": step, "version": step, "reward_mean": 0.1 * step, "reward_std": 0.4, "generated_tokens_per_s": None if step == 1 else 1234.0, "trained_tokens_per_s": 800.0, "trainer_idle_share": 0.25,
        "replica_idle_share": 0.0, "seconds": {"total": 4.0, "wait": 1.0, "train": 2.9, "snapshot": 0.01}, "mismatch_kl": 0.000123, "completion_tokens_mean": 43.2, "truncated_share": 0.5, "loss": -0.01, "entropy_estimate": 1.5, "grad_norm": 0.7,
    }  # fmt: skip


def shown(width: int = 120, *, num_steps: int = 12, height: int | None = None, **changes: Any) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(page(a_status(**changes), [a_step(step) for step in range(1, num_steps + 1)], num_steps=50, time="12:00:00", width=width, height=height))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_it_shows_where_the_run_is_and_what_each_side_does() -> None:
    text = shown()
    for words in (
        "first   running", "/runs/first", "step 12 of 50", "version 12", "no alarm fires", "reward              1.2 ± 0.4", "1,234 drawn, 800 trained", "learner 25%, replicas 0%", "4.0: wait 1.0, train 2.9", "8 of at most 16",
        "zero_signal 4", "0 steps", "75%", "rollout-0", "123,456", "10 (-2)", "stale", "FAILED in apply", "gone", "15 min ago", "Replicas (2)",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_alarms_and_the_last_verdict_come_first() -> None:
    alarm = learner_pb2.GetStatusResponse.Alarm(name="HeadraceReplicaStalled", severity="critical", words="replica a has requests and drew no token", since_s=300)
    text = shown(alarms=[alarm], verdict="stalled replica a: it hangs", diagnosis_dir="/runs/first/diagnosis/x")
    assert "HeadraceReplicaStalled  replica a has requests" in text and "for 5 min" in text and text.index("stalled replica a") < text.index("reward")


@pytest.mark.parametrize("width", [80, 99, 100, 120, 200])
def test_it_fits_the_terminal_and_nothing_of_it_is_cut_off(width: int) -> None:
    """Forty steps and more: the newest one's bar is the highest of the reward's, and the last of its line."""
    text = shown(width, num_steps=45)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines) and "…" not in text
    (reward,) = [line for line in lines if "▁" in line and "reward" in line]
    assert "█  " in reward and "4.5" in reward
    assert "requests" in text and "rollout-1: FAILED in apply" in text


@pytest.mark.parametrize(
    ("width", "height", "there", "left"),
    [
        # head 5, alarms 3, step 8, replicas 7 and the last line: 24
        (80, 24, ["step 12 of 50", "no alarm fires", "Step 12", "Replicas (2)"], "a higher window shows: curves, groups, staleness"),
        (80, 60, ["Last 12 steps", "Groups", "Staleness", "Replicas (2)"], ""),
        (120, 24, ["Step 12", "Last 12 steps", "Replicas (2)"], "a higher window shows: groups and staleness"),
        (120, 40, ["Step 12", "Groups", "Staleness", "Replicas (2)"], ""),
        (80, 5, ["step 12 of 50"], "a higher window shows: alarms"),
    ],
)
def test_a_low_terminal_shows_what_matters_most_and_says_what_it_does_not(width: int, height: int, there: list[str], left: str) -> None:
    text = shown(width, height=height)
    assert all(words in text for words in there)
    assert (left in text) if left else ("a higher window" not in text)
    assert len(text.splitlines()) <= max(height, 6)  # the head alone is never left out


@pytest.mark.parametrize(("values", "bars"), [([0, 1, 2], "▁▅█"), ([5.0, 5.0], "▁▁"), ([0, None, 7], "▁ █"), ([], ""), (list(range(100)), None)])
def test_bars_run_from_the_lowest_to_the_highest(values: list[float | None], bars: str | None) -> None:
    if bars is None:
        assert len(spark(values)) == 40 and spark(values)[0] == "▁" and spark(values)[-1] == "█"
    else:
        assert spark(values) == bars


def test_watching_bears_a_gateway_that_is_away_for_a_while_and_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "EVERY_S", 0.0)
    answers: list[Any] = [a_status(run_dir=str(tmp_path)), Mistakes(["nobody answers"]), a_status(run_dir=str(tmp_path)), a_status(run_dir=str(tmp_path), finished=True)]

    def ask() -> learner_pb2.GetStatusResponse:
        answer = answers.pop(0)
        if isinstance(answer, Mistakes):
            raise answer
        return answer

    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    watching.watch(ask, str(tmp_path), console)
    assert not answers and "finished" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(Mistakes):
        watching.watch(lambda: (_ for _ in ()).throw(Mistakes(["nobody"])), "nowhere:1", console)


def test_the_page_can_be_looked_at_as_a_picture(tmp_path: Path) -> None:
    draw(page(a_status(), [a_step(1)], num_steps=50, time="12:00:00", width=80), 80, tmp_path / "page.png")
    picture = imread(tmp_path / "page.png")
    dark = (abs(picture[..., :3] - [each / 255 for each in MONOKAI.background_color]) < 0.01).all(axis=-1)
    assert picture.shape[1] == pytest.approx(80 * CELL + 20, abs=1) and 0.7 < dark.mean() < 0.99  # words on a dark ground
