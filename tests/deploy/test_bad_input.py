"""A user's mistake through each of the three doors: the command line, `python -m SERVICE --config`, and Python. One clear line,
exit code 2 (ValueError in Python), no traceback, nothing left running."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headrace
from deploy.cli import app
from learner import __main__ as learner
from reward_server import __main__ as reward_server
from rollout_server import __main__ as rollout_server

ROOT = Path(__file__).resolve().parents[2]
Changes = dict[str, Any]

# Keys of LearnerConfig to set, and words of the one line that says what is wrong with them.
LEARNER: list[tuple[Changes, tuple[str, ...]]] = [
    ({"stepz": 3}, ("stepz: unknown key (value 3)", "remove it or correct its spelling")),
    ({"optimizer": {"learning_rate": 1}}, ("optimizer.learning_rate: unknown key (value 1)",)),
    ({"optimizer": 3}, ("optimizer: ", "got 3")),
    ({"sampling": {"temperature": 0}}, ("sampling.temperature=0 with group_size=8", "use a temperature above 0")),
    ({"sampling": {"temperature": 0.001}}, ("sampling.temperature=0.001 lies below 0.01", "use 0.01 or more")),
    ({"sampling": {"temperature": math.inf}}, ("sampling.temperature: Input should be a finite number",)),
    ({"sampling": {"temperature": math.nan}}, ("sampling.temperature: Input should be a finite number",)),
    ({"sampling": {"group_size": 1}}, ("sampling.group_size=1 with algorithm grpo", "group_size of 2 or more")),
    ({"sampling": {"top_p": 0.9}}, ("sampling.top_p=0.9", "only top_p=1")),
    ({"sampling": {"top_k": 5}}, ("top_k=5", "top_k=0")),
    ({"sampling": {"stop_token_ids": [-5]}}, ("sampling.stop_token_ids.0: ", "got -5")),
    ({"sampling": {"max_new_tokens": -1}}, ("sampling.max_new_tokens: ", "got -1")),
    ({"steps": -1}, ("steps: Input should be greater than or equal to 1, got -1",)),
    ({"seed": 2**70}, ("seed: Input should be less than 2147483648",)),
    ({"optimizer": {"lr": -1.0}}, ("optimizer.lr: ", "got -1.0")),
    ({"optimizer": {"lr": math.inf}}, ("optimizer.lr: Input should be a finite number",)),
    ({"optimizer": {"betas": [1.5, 0.9]}}, ("optimizer.betas.0: Input should be less than 1, got 1.5",)),
    ({"algorithm": {"loss": {"dual_clip": -3.0}}}, ("dual_clip: Input should be greater than 1, got -3.0",)),
    ({"staleness": {"max_staleness": 0, "window": 2}}, ("staleness.window=2 with max_staleness=0", "use window=1")),
    ({"filter": {"min_usable": 9}}, ("filter.min_usable=9 is more than sampling.group_size=8", "use a smaller min_usable")),
    ({"optimizer": {"minibatches": 9}}, ("optimizer.minibatches=9 is more than groups_per_step=8", "use fewer")),
    ({"lease": {"silence_s": 0.5}}, ("lease.silence_s=0.5 is not more than heartbeat_s=1.0",)),
    ({"push": {"transport": "nccl"}, "trainer": {"device": "cpu"}}, ("push.transport=nccl with trainer.device=cpu", "auto or gloo")),
    ({"address": "127.0.0.1:99999"}, ("address='127.0.0.1:99999': port 99999 lies outside 0 to 65535",)),
    ({"address": "localhost"}, ("address='localhost' must be host:port",)),
    ({"run_dir": "/dev/null/run"}, ("run_dir: /dev/null/run cannot be used", "choose a folder that can be written")),
]
MODULES: dict[str, Callable[[], int]] = {"learner": learner.main, "rollout_server": rollout_server.main, "reward_server": reward_server.main}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "sort 3 1 2", "answer": "1 2 3"}\n')
    return file


def ids(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else ""


def settings(prompts: Path, changes: Changes) -> Changes:
    return {"run_dir": str(prompts.parent / "run"), "model": "some/model", "data": {"prompts": str(prompts)}, **changes}


def main_of(module: str, config: Changes, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that `python -m MODULE --config FILE` tells its user, in this process; it must leave with 2."""
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", [module, "--config", str(file)])
    assert MODULES[module]() == 2
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return [line for line in errors.splitlines() if line.startswith("headrace: ")]


@pytest.mark.parametrize(("changes", "words"), LEARNER, ids=ids)
def test_a_learners_mistake_is_one_line_when_it_is_started_as_a_module(
    changes: Changes, words: tuple[str, ...], prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = main_of("learner", settings(prompts, changes), prompts.parent, monkeypatch, capsys)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(("changes", "words"), [case for case in LEARNER if "address" not in case[0] and "run_dir" not in case[0]], ids=ids)
def test_a_learners_mistake_is_one_line_on_the_command_line(changes: Changes, words: tuple[str, ...], prompts: Path) -> None:
    alone, whole = prompts.parent / "learner.json", prompts.parent / "run.json"
    config = settings(prompts, changes)
    alone.write_text(json.dumps(config))
    rest = {"rollout": {}, "reward": {"scorers": [{"name": "a", "use": "exact"}]}}
    whole.write_text(json.dumps({"run_dir": config.pop("run_dir"), "model": config.pop("model"), "learner": config, **rest}))
    for command in (["serve", "learner", "--config", str(alone)], ["launch", str(whole)], ["validate", str(whole)]):
        result = CliRunner().invoke(app, command)
        (line,) = result.stderr.splitlines()
        assert result.exit_code == 2 and line.startswith("headrace: ") and all(word in line for word in words), line


@pytest.mark.parametrize(("changes", "words"), [case for case in LEARNER if "run_dir" not in case[0]], ids=ids)
def test_a_learners_mistake_is_a_value_error_in_python(changes: Changes, words: tuple[str, ...], prompts: Path) -> None:
    with pytest.raises(ValueError) as caught:
        headrace.GRPOTrainer(model="some/model", prompts=prompts, reward="exact", **changes)
    assert len(str(caught.value).splitlines()) == 1 and all(word in str(caught.value) for word in words), caught.value


OTHERS: list[tuple[str, Changes, tuple[str, ...]]] = [
    ("rollout_server", {"engin": "small"}, ("engin: unknown key (value 'small')",)),
    ("rollout_server", {"learner": "127.0.0.1:7430"}, ("learner=127.0.0.1:7430 without rewards",)),
    ("rollout_server", {"learner": "nowhere", "rewards": ["127.0.0.1:1"]}, ("learner='nowhere' must be host:port",)),
    ("rollout_server", {"learner": "127.0.0.1:1", "rewards": ["127.0.0.1:99999"]}, ("rewards='127.0.0.1:99999': port 99999 lies outside 1 to 65535",)),
    ("rollout_server", {"address": "127.0.0.1:99999"}, ("port 99999 lies outside 0 to 65535", "0 for a free one")),
    ("rollout_server", {"max_model_len": 10**7}, ("max_model_len=10000000", "reads 2048 positions", "at most 2048")),
    ("rollout_server", {"seed": 2**40}, ("seed: ",)),
    ("rollout_server", {"score_timeout_s": math.inf}, ("score_timeout_s: Input should be a finite number",)),
    ("reward_server", {"scorers": [{"name": "a", "use": "exact", "limit": 1}]}, ("scorers.0.limit: unknown key (value 1)",)),
    ("reward_server", {"scorers": []}, ("scorers: the list is empty", "give one")),
    ("reward_server", {"scorers": [{"name": "", "use": "exact"}]}, ("scorers.0.name: ",)),
    ("reward_server", {"address": "127.0.0.1:99999"}, ("port 99999 lies outside 0 to 65535",)),
    ("reward_server", {"scorers": [{"name": "a", "use": "no.such:score"}]}, ("module 'no.such' was not found",)),
]


@pytest.mark.parametrize(("module", "changes", "words"), OTHERS, ids=ids)
def test_a_mistake_of_the_other_services_is_one_line(
    module: str, changes: Changes, words: tuple[str, ...], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout, reward = {"model": str(tiny_model), "engine": "small", "max_model_len": 64}, {"scorers": [{"name": "a", "use": "exact"}]}
    (line,) = main_of(module, {**(rollout if module == "rollout_server" else reward), **changes}, tmp_path, monkeypatch, capsys)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("content", "words"), [(b"\xff\xfe\x00", "YAML"), (b"a: [", "YAML"), (b"[1]", "must hold")], ids=["binary", "torn", "list"])
def test_a_file_that_is_no_configuration_is_named(
    module: str, content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_bytes(content)
    monkeypatch.setattr(sys, "argv", [module, "--config", str(file)])
    assert MODULES[module]() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: ") and str(file) in line and words in line


PYTHON: list[tuple[Changes, str]] = [
    ({"data": "train.jsonl"}, "data='train.jsonl' must be a mapping"),
    ({"rollout": [1]}, r"rollout=\[1\] must be a mapping"),
    ({"reward": 3}, "reward=3 must be a scorer's name"),
    ({"rollout": {"model": Path("other")}}, "rollout.model"),
    ({"rollout": {"rewards": ["nowhere"]}, "reward_server": None}, "rollout.rewards='nowhere' must be host:port"),
    ({"model": "/no/such"}, "model='/no/such': /no/such/config.json does not exist"),
    ({"prompts": "/no/such.jsonl"}, "no such file"),
]


@pytest.mark.parametrize(("changes", "words"), PYTHON, ids=[next(iter(changes)) + str(i) for i, (changes, _) in enumerate(PYTHON)])
def test_what_only_python_can_get_wrong_is_a_value_error_too(changes: Changes, words: str, prompts: Path) -> None:
    with pytest.raises(ValueError, match=words):
        headrace.GRPOTrainer(**{"model": "some/model", "prompts": prompts, "reward": "exact", **changes})


def test_a_run_folder_that_cannot_be_made_is_told_by_every_command(prompts: Path) -> None:
    with pytest.raises(ValueError, match=r"run_dir: /dev/null/run cannot be used: .*; choose a folder that can be written"):
        headrace.GRPOTrainer(model="some/model", prompts=prompts, reward="exact", run_dir="/dev/null/run").train()
    for command in ("demo", "smoke"):
        result = CliRunner().invoke(app, [command, "--run-dir", "/dev/null/run"])
        assert result.exit_code == 2 and result.stderr.startswith("headrace: run_dir: /dev/null/run cannot be used")


def test_a_model_whose_configuration_is_no_json_is_named(prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{torn")
    with pytest.raises(ValueError, match=f"model='{tmp_path}': .*config.json is no model's configuration"):
        headrace.GRPOTrainer(model=tmp_path, prompts=prompts, reward="exact")


RUNS: list[tuple[str, Changes, tuple[str, ...]]] = [
    ('{"prompt": "a"}\n{"prompt": "b"\n', {}, ("line 2: not JSON", "write one JSON object a line")),
    ('{"question": "a"}\n', {}, ("no field 'prompt'", "data.prompt_field")),
    ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', {"learner.data.id_field": "id"}, ("id '1' was used on line 1 already",)),
    ("\n\n", {}, ("holds no prompts",)),
    ('{"prompt": "' + "long " * 2000 + '"}\n', {}, ("1 of 1 prompts are over the limit", "data.overlong=drop")),
    ('{"prompt": "a"}\n', {"reward.scorers": [{"name": "a", "use": "no.such:score"}]}, ("module 'no.such' was not found",)),
]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("lines", "changes", "words"), RUNS, ids=range(len(RUNS)))
def test_a_mistake_that_only_a_service_can_find_ends_the_launch_with_2_and_leaves_nothing_running(
    lines: str, changes: Changes, words: tuple[str, ...], prompts: Path, tiny_model: Path
) -> None:
    prompts.write_text(lines)
    ran, run_dir = launched(prompts, tiny_model, changes)
    told = [line for line in ran.stderr.splitlines() if line.startswith("headrace: ")]
    assert ran.returncode == 2 and "Traceback" not in ran.stderr and len(told) == 1
    assert all(word in told[0] for word in words), told[0]
    assert not running_in(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_port_in_use_ends_the_launch_with_2(prompts: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        ran, run_dir = launched(prompts, tiny_model, {"learner.address": address})
    told = [line for line in ran.stderr.splitlines() if line.startswith("headrace: ")]
    assert ran.returncode == 2 and len(told) == 1 and f"cannot listen on {address}" in told[0]
    assert not running_in(run_dir)


def launched(prompts: Path, model: Path, changes: Changes) -> tuple[subprocess.CompletedProcess[str], Path]:
    run_dir = prompts.parent / "run"
    learner = {"steps": 1, "data": {"prompts": str(prompts), "template": "raw"}, "sampling": {"max_new_tokens": 4}}
    rollout, reward = {"engine": "small", "max_model_len": 64}, {"scorers": [{"name": "a", "use": "exact"}]}
    file = prompts.parent / "run.json"
    file.write_text(json.dumps({"run_dir": str(run_dir), "model": str(model), "learner": learner, "rollout": rollout, "reward": reward}))
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "deploy.cli", "launch", str(file), *sets]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}), run_dir


def running_in(run_dir: Path, limit_s: float = 5.0) -> list[str]:
    """Command lines of processes that were started for this run folder and have not ended."""
    end = time.monotonic() + limit_s
    while True:
        found = [command for command in map(command_line, Path("/proc").glob("[0-9]*/cmdline")) if str(run_dir) in command]
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def command_line(path: Path) -> str:
    """Empty for a process that has ended meanwhile."""
    with contextlib.suppress(OSError):
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
