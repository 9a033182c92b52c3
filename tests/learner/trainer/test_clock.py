"""Where a step's seconds went, and that starting is no step's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.trainer.checkpoint import SaveReport
from learner.trainer.clock import Clock
from learner.trainer.publish import Published
from learner.trainer.record import Recorder
from learner.weights.plan import make_plan
from learner.weights.push import PushMetrics
from learner.weights.snapshot import Snapshot
from tests.learner.trainer.test_metrics import NOTHING, batch, entry


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that clocks show, to be set."""
    now = [100.0]
    monkeypatch.setattr("learner.trainer.clock.time.monotonic", lambda: now[0])
    return now


def test_what_comes_before_the_first_batch_is_told_once_and_is_in_no_total(hands: list[float]) -> None:
    clock = Clock()
    with clock.time("wait"):
        hands[0] = 160.0  # replicas load their model
    clock.begin()
    with clock.time("train"):
        hands[0] = 162.0
    assert clock.take() == {"startup": 60.0, "train": 2.0, "total": 2.0}
    with clock.time("wait"):
        hands[0] = 165.0
    clock.begin()
    assert clock.take() == {"wait": 3.0, "total": 3.0}


def test_the_first_steps_rate_of_generation_is_none_and_that_of_training_is_of_the_step_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, active=True, clip=(0.2, 0.28))
    snapshot = Snapshot(folder=tmp_path, policy_step=1, rank=0, num_bytes=0, total_bytes=0, seconds=0.0, plan=make_plan((), (), bucket_bytes=1024))
    published = Published(version=1, lineage=0, policy_step=1, snapshot=snapshot)
    for seconds in ({"startup": 60.0, "train": 2.0, "total": 2.0}, {"wait": 3.0, "total": 4.0}):
        recorder.step(batch(entry(0)), NOTHING, published, SaveReport(), PushMetrics(), seconds)
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["generated_tokens_per_s"] is None and first["trained_tokens_per_s"] == 2.0 and first["seconds"]["startup"] == 60.0  # 4 tokens in 2 s
    assert second["generated_tokens_per_s"] is not None and "startup" not in second["seconds"] and second["trainer_idle_share"] == 0.75
