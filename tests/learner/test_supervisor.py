"""Which child is started again, which ends everything, and with which code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from learner import children, supervisor
from learner.config import LearnerConfig
from learner.process import read_config
from learner.supervisor import Supervisor, claimed, prepare

FAKE = "tests.learner.fake_child"


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {"run_dir": str(run_dir), "model": "none", "address": "127.0.0.1:0", "data": {"prompts": "none"}, "trainer": {"ranks": 2}, **changes}


def scripts(run_dir: Path, **lines: list[str]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    for name in ("gateway", "trainer_0", "trainer_1"):
        (run_dir / f"{name.replace('_', '-')}.script").write_text("\n".join(lines.get(name, ["until-told"])) + "\n")


def starts(run_dir: Path, name: str) -> list[str]:
    return (run_dir / f"{name}.started").read_text().split()


async def supervise(run_dir: Path, **changes: Any) -> int:
    config, resolved = prepare(LearnerConfig.model_validate(settings(run_dir, **changes)))
    return await asyncio.wait_for(Supervisor(config, resolved, gateway=FAKE, trainer=FAKE).run(), 40)


async def test_all_ranks_ending_well_is_a_finished_run(tmp_path: Path) -> None:
    scripts(tmp_path, trainer_0=["exit 0"], trainer_1=["sleep 0.2 exit 0"])
    assert await supervise(tmp_path) == 0
    assert len(starts(tmp_path, "gateway")) == 1 and len(starts(tmp_path, "trainer-0")) == 1


async def test_a_rank_that_fails_makes_all_ranks_start_again_as_a_new_incarnation(tmp_path: Path) -> None:
    scripts(tmp_path, trainer_0=["until-told", "exit 0"], trainer_1=["sleep 0.3 exit 1", "exit 0"])
    assert await supervise(tmp_path) == 0
    first, second = starts(tmp_path, "trainer-0")
    assert starts(tmp_path, "trainer-1") == [first, second] and int(second) > int(first)
    assert len(starts(tmp_path, "gateway")) == 1


async def test_a_gateway_that_dies_is_started_again_beside_the_ranks(tmp_path: Path) -> None:
    scripts(tmp_path, gateway=["sleep 0.2 exit 1", "until-told"], trainer_0=["sleep 2 exit 0"], trainer_1=["sleep 2 exit 0"])
    assert await supervise(tmp_path) == 0
    assert len(starts(tmp_path, "gateway")) == 2 and len(starts(tmp_path, "trainer-0")) == 1


@pytest.mark.parametrize("who", ["gateway", "trainer_1"])
async def test_a_users_mistake_is_passed_on_and_never_tried_again(who: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scripts(tmp_path, **{who: ["say 'a traceback above' say 'headrace: model: no such folder' exit 2"]})
    assert await supervise(tmp_path) == 2
    assert "headrace: model: no such folder\n" in capfd.readouterr().err
    assert len(starts(tmp_path, who.replace("_", "-"))) == 1


async def test_ranks_that_keep_failing_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(children, "MAX_FAILURES", 1)
    scripts(tmp_path, trainer_0=["say boom exit 1"])
    assert await supervise(tmp_path) == 1
    assert "failed 2 times in a row" in capfd.readouterr().err
    assert len(starts(tmp_path, "trainer-0")) == 2


async def test_a_gateway_that_left_after_the_run_was_finished_is_not_started_again(tmp_path: Path) -> None:
    scripts(tmp_path, gateway=["sleep 0.2 exit 0"], trainer_0=["sleep 1.5 exit 0"], trainer_1=["sleep 1.5 exit 1"])  # a rank dies as it leaves
    assert await supervise(tmp_path) == 0
    assert len(starts(tmp_path, "gateway")) == 1 and len(starts(tmp_path, "trainer-0")) == 1


async def test_ranks_that_stay_after_the_run_was_finished_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LAST_RANKS_S", 0.3)
    scripts(tmp_path, gateway=["sleep 0.2 exit 0"])
    assert await supervise(tmp_path) == 0


async def told_to_stop(run_dir: Path, **changes: Any) -> int:
    """The exit code when SIGTERM comes once both ranks are ready for it."""
    running = asyncio.create_task(supervise(run_dir, **changes))
    while not all((run_dir / f"trainer-{rank}.ready").exists() for rank in range(2)):
        assert not running.done()
        await asyncio.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    return await running


async def test_told_to_stop_it_waits_for_the_ranks_to_leave_and_keeps_the_gateway_for_them(tmp_path: Path) -> None:
    scripts(tmp_path, gateway=["sleep 1 exit 1", "until-told"], trainer_0=["deaf sleep 6 exit 0"], trainer_1=["deaf sleep 6 exit 0"])
    assert await told_to_stop(tmp_path) == 0
    assert len(starts(tmp_path, "trainer-0")) == 1 and len(starts(tmp_path, "gateway")) == 2


@pytest.mark.parametrize("line", ["deaf sleep 3 exit 1", "deaf sleep 60 exit 0"])
async def test_told_to_stop_and_left_without_a_cut_is_exit_code_1_in_one_line(tmp_path: Path, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that says so, and one that does not leave in time."""
    scripts(tmp_path, trainer_0=["until-told"], trainer_1=[line])
    assert await told_to_stop(tmp_path, checkpoint={"leave_s": 5}) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("headrace: ")]
    assert len(said) == 1 and "left without a cut of the last step" in said[0] and "checkpoint.leave_s=5" in said[0]
    assert len(starts(tmp_path, "trainer-1")) == 1


def test_the_run_folder_holds_what_was_resolved(tmp_path: Path) -> None:
    config, resolved = prepare(LearnerConfig.model_validate(settings(tmp_path / "new")))
    assert not config.address.endswith(":0")
    assert LearnerConfig.model_validate(json.loads(resolved.read_text())) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [("stesp: 3", "stesp"), ("[1]", "must hold a mapping"), ("steps: 0", "steps: Input should be greater than or equal to 1, got 0"), ("a: [", "neither YAML nor JSON")],
)
def test_a_mistake_in_the_file_names_file_key_and_value(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "learner.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_config(path)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_the_command_ends_with_2_and_lines_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "learner.yaml"
    path.write_text("steps: 0")
    done = subprocess.run([sys.executable, "-m", "learner", "--config", str(path)], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert all(line.startswith("headrace: ") for line in done.stderr.splitlines()) and "Traceback" not in done.stderr


async def test_a_clock_that_was_set_back_makes_no_older_incarnation(tmp_path: Path) -> None:
    scripts(tmp_path, trainer_0=["until-told", "exit 0"], trainer_1=["sleep 0.3 exit 1", "exit 0"])
    future = time.time_ns() + 10**15
    (tmp_path / "incarnation").write_text(f"{future}\n")
    assert await supervise(tmp_path) == 0
    assert [int(number) - future for number in starts(tmp_path, "trainer-0")] == [1, 2]
    assert int((tmp_path / "incarnation").read_text()) == future + 2


async def test_failures_between_which_the_run_came_further_are_not_in_a_row(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    patience = children.Patience(tmp_path)
    for step in range(2 * children.MAX_FAILURES):
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step + 1}) + "\n")
        assert await patience.after(1.0)
        assert patience.num_failures == 1


async def test_doing_the_same_steps_again_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "sleep", no_time)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 3}\n')
    patience = children.Patience(tmp_path)
    answers = []
    for _ in range(children.MAX_FAILURES + 1):
        with metrics.open("a") as file:
            file.write('{"step": 2}\n{"step": 3}\n{"st')
        answers.append(await patience.after(1.0))
    assert answers == [True] * children.MAX_FAILURES + [False]


async def no_time(seconds: float) -> None:
    """Instead of asyncio.sleep."""


@pytest.mark.parametrize(("line", "code"), [("sleep 0.3 exit 0", 0), ("say 'headrace: no such model' exit 2", 2)])
async def test_the_gateway_alone_is_kept_until_it_ends_by_itself(tmp_path: Path, line: str, code: int) -> None:
    scripts(tmp_path, gateway=["sleep 0.1 exit 1", line])
    config, resolved = prepare(LearnerConfig.model_validate(settings(tmp_path)))
    assert await asyncio.wait_for(Supervisor(config, resolved, gateway=FAKE, trainer=FAKE, gateway_only=True).run(), 30) == code
    assert len(starts(tmp_path, "gateway")) == 2 and not (tmp_path / "trainer-0.started").exists()


def test_a_second_learner_on_one_run_folder_is_refused_and_leaves_the_first_ones_files_alone(tmp_path: Path) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "learner.yaml"
    path.write_text(json.dumps(settings(run_dir)))
    with claimed(run_dir):
        prepare(LearnerConfig.model_validate(settings(run_dir)))
        (run_dir / "gateway.address").write_text("127.0.0.1:7430\n")
        before = (run_dir / "resolved" / "learner.json").read_text()
        done = subprocess.run([sys.executable, "-m", "learner", "--config", str(path)], capture_output=True, text=True, timeout=50, check=False)
        assert (done.returncode, done.stderr) == (2, f"headrace: run_dir: {run_dir} is in use by another learner; stop that one, or use another run_dir\n")
        assert (run_dir / "gateway.address").read_text() == "127.0.0.1:7430\n"
        assert (run_dir / "resolved" / "learner.json").read_text() == before
    with claimed(run_dir):
        pass  # free again


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"run_dir: .*/file/run cannot be used: .*; choose a folder that can be written"), claimed(tmp_path / "file" / "run"):
        pass
