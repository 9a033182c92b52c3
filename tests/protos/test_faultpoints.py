"""Faults of tests: misspelt ones fail at the start, planted ones fire once in one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protos import faultpoints

ROOT = Path(__file__).resolve().parents[2]


def test_a_setting_names_point_action_and_passage() -> None:
    assert faultpoints.parse("before_fsync=kill@3") == ("before_fsync", "kill", 3)
    assert faultpoints.parse("trainer_update=raise") == ("trainer_update", "raise", 1)


@pytest.mark.parametrize("setting", ["before_sync=kill", "before_fsync", "before_fsync=die", "before_fsync=kill@0", "before_fsync=kill@x"])
def test_a_misspelt_setting_is_refused_at_the_start(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_FAULT", setting)
    with pytest.raises(ValueError, match=f"HEADRACE_FAULT={setting}"):
        faultpoints.check()


@pytest.mark.parametrize("module", ["learner", "learner.gateway", "rollout_server"])
def test_a_service_with_a_misspelt_fault_ends_as_with_any_other_mistake(module: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    ran = subprocess.run(
        [sys.executable, "-m", module, "--config", str(tmp_path / "c.json")],
        cwd=ROOT, env={**os.environ, "HEADRACE_FAULT": "everywhere=kill"}, capture_output=True, text=True, timeout=50,
    )
    assert ran.returncode == 2
    assert "no such point 'everywhere'" in ran.stderr


def test_every_point_that_is_passed_is_listed_and_every_listed_one_is_passed() -> None:
    files = [file for part in ("learner", "rollout_server", "reward_server", "protos") for file in (ROOT / part).rglob("*.py")]
    text = "".join(file.read_text() for file in files if file.name != "faultpoints.py")
    passed = {piece.partition('"')[0] for piece in text.split('faultpoints.point("')[1:]}
    assert passed == set(faultpoints.POINTS)


def test_the_wanted_passage_fires_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faultpoints, "_passages", {})
    monkeypatch.setenv("HEADRACE_FAULT", "before_plan=full@2")
    faultpoints.point("before_plan")
    faultpoints.point("before_fsync")
    with pytest.raises(OSError, match="no space left, as planted at before_plan"):
        faultpoints.point("before_plan")
    faultpoints.point("before_plan")


def test_a_planted_fault_kills_the_first_process_that_comes_by_and_no_second(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    faultpoints.plant(file, "after_receipt=kill")
    command = [sys.executable, "-c", "from protos import faultpoints as f; f.point('before_plan'); f.point('after_receipt')"]
    environment = {**os.environ, "HEADRACE_FAULT_FILE": str(file)}
    codes = [subprocess.run(command, cwd=ROOT, env=environment, timeout=50).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    assert (tmp_path / "fault.fired").read_text() == "after_receipt=kill"


def test_a_misspelt_plant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such point"):
        faultpoints.plant(tmp_path / "fault", "after_reciept=kill")
