"""Trackers with the real libraries: each gets every line once, goes on after a restart, and one that fails is dropped alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerConfig
from learner.trackers import keeping
from learner.trackers.following import Following, Limit, Place
from learner.trackers.tracker import settings_of, values_of
from tests.learner.gateway.gateway_harness import config_in

ROOT = Path(__file__).resolve().parents[3]


def line(step: int, *, loss: float | None, lineage: int = 0, **more: Any) -> str:
    return json.dumps({"step": step, "version": step, "lineage": lineage, "time_s": 1000.0 + step, "loss": loss, "seconds": {"total": 2.0}, "groups": ["g1"], **more}) + "\n"


def the_run(folder: Path, **trackers: Any) -> LearnerConfig:
    config = config_in(folder, trackers=trackers)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.json").write_text(config.model_dump_json())
    return config


def follow(config: LearnerConfig, name: str, lines: list[str], *, code: int = 0, environment: Mapping[str, str] = {}) -> str:
    """One life of a tracker's process, in which these lines are appended; what it said."""
    path = config.run_dir / "metrics.jsonl"
    command = [sys.executable, "-m", "learner.trackers", "--config", str(config.run_dir / "config.json"), "--tracker", name]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_SILENT": "true", **environment})
    try:
        for each in lines:
            with path.open("a") as file:
                file.write(each)
        end_s = time.monotonic() + 100
        while process.poll() is None and time.monotonic() < end_s and Place.read(config.run_dir / "trackers" / f"{name}.json").offset != path.stat().st_size:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code, said
    return said


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, Mapping[str, float]]] = []
        self.back: list[int] = []

    def log(self, step: int, values: Mapping[str, float], time_s: float) -> None:
        self.points.append((step, values))

    def went_back(self, step: int) -> None:
        self.back.append(step)

    def close(self) -> None:
        pass


def test_the_numbers_of_a_line_have_paths_and_what_is_no_number_is_left_out() -> None:
    content = json.loads(line(3, loss=None, dropped={"zero_signal": 2}, mismatch={"kl_k3": 0.5}, no_signal=True, note="text"))
    assert values_of(content) == {"version": 3.0, "lineage": 0.0, "seconds/total": 2.0, "dropped/zero_signal": 2.0, "mismatch/kl_k3": 0.5, "no_signal": 1.0}


def test_settings_are_dotted_and_hold_no_place_of_a_secret(tmp_path: Path) -> None:
    found = settings_of(json.loads(config_in(tmp_path).model_dump_json()))
    assert found["optimizer.lr"] and not [key for key in found if key.startswith(("security", "trackers"))]


def test_whole_lines_are_given_once_over_two_lives_and_rollbacks_are_told(tmp_path: Path) -> None:
    lines, place, kept = tmp_path / "metrics.jsonl", tmp_path / "trackers" / "x.json", Kept()
    limit = Limit(60, lambda what: None)
    assert Following(lines, place, kept, limit).catch_up() == 0  # no file yet
    lines.write_text(line(1, loss=0.1) + line(2, loss=0.2) + line(3, loss=0.3)[:-5])
    assert Following(lines, place, kept, limit).catch_up() == 2
    with lines.open("a") as file:
        file.write(line(3, loss=0.3)[-5:] + line(2, loss=0.25, lineage=1) + line(2, loss=None, lineage=1, evaluation={"score": 0.5}))
    assert Following(lines, place, kept, limit).catch_up() == 3
    assert [(step, values.get("loss")) for step, values in kept.points] == [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25), (2, None)]
    assert kept.points[-1][1]["evaluation/score"] == 0.5 and kept.back == [2]
    assert Place.read(place).offset == lines.stat().st_size


@pytest.mark.timeout(240)
def test_tensorboard_reads_every_point_and_forgets_what_was_rolled_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = the_run(tmp_path, tensorboard={})
    follow(config, "tensorboard", [line(1, loss=0.5), line(2, loss=0.4), line(3, loss=0.3)])
    follow(config, "tensorboard", [line(3, loss=0.25, lineage=1), line(4, loss=0.2, lineage=1)])
    events = EventAccumulator(str(config.run_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, pytest.approx(event.value)) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.4), (3, 0.25), (4, 0.2)]
    assert events.Scalars("seconds/total")[0].wall_time == 1001.0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_mlflow_goes_on_with_the_same_run_after_a_restart(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow.tracking")
    config = the_run(tmp_path, mlflow={})
    follow(config, "mlflow", [line(1, loss=0.5), line(2, loss=0.4)])
    follow(config, "mlflow", [line(3, loss=0.3)])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{config.run_dir / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("headrace").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED" and run.data.params["groups_per_step"] == "2"
    assert [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run.info.run_id, "loss")] == [(1, 0.5, 1001000), (2, 0.4, 1002000), (3, 0.3, 1003000)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_wandb_offline_keeps_every_point_under_the_runs_own_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = the_run(tmp_path, wandb={"project": "p"})
    follow(config, "wandb", [line(1, loss=0.5), line(2, loss=0.4)])
    follow(config, "wandb", [line(3, loss=0.3)])
    points = [point for file in sorted((config.run_dir / "wandb").glob("offline-run-*/run-r1.wandb")) for point in points_of(file)]
    assert [(point["policy_step"], point["loss"]) for point in points if "loss" in point] == [(1, 0.5), (2, 0.4), (3, 0.3)]


def points_of(file: Path) -> list[dict[str, Any]]:
    """What an offline run's file holds: W&B's records in the log format of LevelDB (doc/log_format.md), after seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records_of(file.read_bytes()):
        record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return found


def records_of(data: bytes, *, block_bytes: int = 32 << 10, at: int = 7) -> list[bytes]:
    """Records are cut at blocks: of each piece 4 bytes of checksum, 2 of its length, 1 of its kind (1 whole, 2 first, 3 middle, 4 last)."""
    found, piece = [], b""
    while at + 7 <= len(data):
        if block_bytes - at % block_bytes < 7:
            at += block_bytes - at % block_bytes
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(piece)
            piece = b""
    return found


BROKEN = """
import time
class EventFileWriter:
    def __init__(self, folder, flush_secs): pass
    def add_event(self, event):
        {what}
    def flush(self): pass
    def close(self): pass
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("what", "why"), [("raise OSError(28, 'No space left on device')", "OSError: [Errno 28] No space left on device"), ("time.sleep(600)", "it took longer than trackers.limit_s=2 for step 1")], ids=["raises", "hangs"])
def test_a_tracker_that_fails_is_dropped_with_one_line_and_tried_again_by_the_next_start(tmp_path: Path, what: str, why: str) -> None:
    config = the_run(tmp_path, tensorboard={}, limit_s=2)
    stand_in = tmp_path / "stand_in" / "tensorboard"
    for module in ("summary.writer.event_file_writer", "compat.proto.event_pb2", "compat.proto.summary_pb2"):
        file = stand_in / (module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, *file.parent.parents):  # else the installed package goes before it
            if folder.is_relative_to(stand_in):
                (folder / "__init__.py").touch()
        file.write_text(BROKEN.format(what=what) if "writer" in module else "class Event:\n    def __init__(self, **given): pass\nclass Summary(Event):\n    Value = Event\nclass Value(Event): pass\nclass SessionLog(Event): START = 1\nSummary.Value = Event\n")
    said = follow(config, "tensorboard", [line(1, loss=0.5)], code=3, environment={"PYTHONPATH": f"{tmp_path / 'stand_in'}:{ROOT}"})
    assert said.splitlines()[-1] == f"headrace: the tracker tensorboard is dropped, the run goes on without it: {why}"
    assert keeping.count(config.run_dir, ("tensorboard", "mlflow")) == {"following": 1, "dropped": 1}
    follow(config, "tensorboard", [])  # the library is whole again
    assert Place.read(config.run_dir / "trackers" / "tensorboard.json").dropped == "" and keeping.count(config.run_dir, ("tensorboard",))["dropped"] == 0
    assert Place.read(config.run_dir / "trackers" / "tensorboard.json").step == 1


async def test_the_learner_neither_waits_for_a_tracker_nor_ends_with_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.json").write_text("{}")
    trackers = keeping.Trackers(("tensorboard",), tmp_path / "broken.json", tmp_path)
    await trackers.start()
    await trackers.end()
    assert "tracker-tensorboard ended with" in caplog.text


def test_a_tracker_that_is_not_installed_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.trackers.keeping.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"trackers.wandb is set and wandb is not installed: install headrace\[wandb\], or leave trackers.wandb out"):
        keeping.check(("wandb",))
