"""A diagnosis on disk: whole, readable, and bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.alarm_config import AlarmConfig
from learner.watch import diagnosis
from learner.watch.diagnosis import LOG_BYTES, Findings
from learner.watch.verdict import causes
from protos.stacks import Process
from tests.learner.watch.test_verdict import WELL


def findings(**changes: Any) -> Findings:
    given: dict[str, Any] = {
        "alarms": ("HeadraceNoStep: no version was published for 31 min",), "causes": causes(WELL, AlarmConfig()), "picture": WELL,
        "gpus": ({"where": "learner", "index": "0", "uuid": "GPU-5f", "use": 0.9, "used_bytes": 1 << 30, "size_bytes": 1 << 31, "power_w": 600.0},),
        "processes": (Process(pid=7, name="-m learner.gateway --config /runs/a/resolved/learner.json", text="state S\nThread 1\n"), Process(pid=8, name="-m learner.trainer --config /runs/a.json --rank 1", text="state R\n")),
    }  # fmt: skip
    return Findings(**{**given, **changes})


def test_it_holds_verdict_numbers_stacks_and_the_ends_of_logs(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text("first line\n" + "x" * LOG_BYTES + "\nlast line\n")
    folder = diagnosis.write(tmp_path / "diagnosis", "HeadraceNoStep", findings(), [log, tmp_path / "missing.log"])
    text = (folder / "verdict.txt").read_text()
    assert text.startswith("Verdict: nothing stands out\n  why: ") and "HeadraceNoStep: no version" in text and "use  90%" in text and "a                  serving" in text
    content = json.loads((folder / "picture.json").read_text())
    assert content["verdict"][0]["kind"] == "nothing stands out" and content["picture"]["waiting_share"] == 0.1
    assert {file.name for file in (folder / "stacks").iterdir()} == {"learner.gateway-7.txt", "learner.trainer-rank1-8.txt"}
    assert "Thread 1" in (folder / "stacks" / "learner.gateway-7.txt").read_text()
    kept = (folder / "logs" / "gateway.log").read_text()
    assert kept.endswith("last line\n") and "first line" not in kept and len(kept) == LOG_BYTES
    assert (folder / "logs" / "missing.log").read_text().startswith("cannot be read")


def test_two_in_one_second_lie_beside_each_other(tmp_path: Path) -> None:
    made = {diagnosis.write(tmp_path, "HeadraceNoStep", findings(), []) for _ in range(3)}
    assert len(made) == 3 and all(folder.is_dir() for folder in made)


def test_the_oldest_make_room_and_the_newest_stays(tmp_path: Path) -> None:
    for name in ("20260101-000000-A", "20260101-000001-B", "20260101-000002-C", "20260101-000003-D"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * 100)
    diagnosis.make_room(tmp_path, keep=3, max_bytes=1000)
    assert sorted(folder.name[-1] for folder in tmp_path.iterdir()) == ["B", "C", "D"]
    diagnosis.make_room(tmp_path, keep=3, max_bytes=250)
    assert sorted(folder.name[-1] for folder in tmp_path.iterdir()) == ["C", "D"]
    diagnosis.make_room(tmp_path, keep=1, max_bytes=10)
    assert sorted(folder.name[-1] for folder in tmp_path.iterdir()) == ["D"]


def test_one_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        diagnosis.write(tmp_path, "HeadraceNoStep", findings(), [tmp_path / "a.log"])
    assert list(tmp_path.iterdir()) == []
