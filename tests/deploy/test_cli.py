"""The command line: a mistake is exit code 2 and one line, help has an example, the start is light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.launch import last_words
from deploy.mistakes import Mistakes
from deploy.schema import load
from deploy.serve import parse_scorers, parse_sets, resolve
from learner.supervisor import last_words as of_learner

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (["serve", "learner"], ["serve", "rollout"], ["serve", "reward"], ["reward", "try"], ["launch"], ["validate"], ["plan"], ["schema"], ["status"], ["report"], ["audit"], ["demo"], ["smoke"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_a_command_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert f"Example: headrace {' '.join(command)}" in " ".join(result.output.split())


MISTAKES: list[tuple[list[str], str]] = [
    (["validate", "absent.yaml"], "headrace: absent.yaml: cannot be read: No such file or directory"),
    (["launch", "absent.yaml"], "headrace: absent.yaml: cannot be read"),
    (["launch", "absent.yaml", "--backend", "cloud"], "headrace: Invalid value for '--backend'"),
    (["validate"], "headrace: Missing argument"),
    (["frobnicate"], "headrace: No such command 'frobnicate'"),
    (["demo", "--control", "magic"], "headrace: Invalid value for '--control'"),
    (["demo", "--max-minutes", "0"], "headrace: Invalid value for '--max-minutes'"),
    (["status", "nowhere"], "headrace: nowhere: neither a run folder nor HOST:PORT"),
    (["status", "127.0.0.1:1"], "headrace: no learner answers on 127.0.0.1:1 (UNAVAILABLE)"),
    (["report", "nowhere"], "headrace: nowhere: "),
    (["audit", "nowhere"], "headrace: nowhere/resolved/learner.json: cannot be read (FileNotFoundError"),
    (["serve", "learner", "--model", "m"], "headrace: run_dir: required, but missing"),
    (["serve", "rollout"], "headrace: model: required, but missing"),
    (["serve", "rollout", "--model", "m", "--learner", "1.2.3.4:5"], "headrace: learner=1.2.3.4:5 without rewards"),
    (["serve", "rollout", "--model", "m", "--set", "dtypo=x"], "headrace: dtypo: unknown key (value 'x')"),
    (["serve", "rollout", "--model", "m", "--set", "dtype"], "headrace: --set dtype: must be KEY=VALUE"),
    (["serve", "reward", "--scorer", "last_number"], "headrace: --scorer last_number: must be NAME=USE"),
    (["serve", "reward"], "headrace: scorers: "),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_exit_code_2_and_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(message)
    assert all(line.startswith("headrace: ") for line in result.stderr.splitlines())


def test_a_mistake_in_a_real_process_leaves_no_traceback(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "deploy.cli", "validate", "absent.yaml"], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "headrace: absent.yaml: cannot be read: No such file or directory; give the path of a YAML file\n"


def test_the_command_line_starts_without_heavy_libraries() -> None:
    code = "import sys, deploy.cli; print(sorted({'torch', 'vllm', 'transformers', 'grpc', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ran.stdout == "[]\n"


def test_a_valid_file_is_summed_up_and_its_plan_is_printed(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["validate", "deploy/templates/cpu.yaml", "--set", f"model={tiny_model}"])  # the template's own is made by `make model`
    assert (result.exit_code, result.stdout) == (0, "deploy/templates/cpu.yaml: valid; 1 rollout, 1 reward, 1 trainer ranks\n")
    result = CliRunner().invoke(app, ["launch", "deploy/templates/cpu.yaml", "--dry-run", "--set", "rollout.replicas=3"])
    assert json.loads(result.output)["processes"] == ["learner", "rollout-0", "rollout-1", "rollout-2", "reward-0"]


def test_a_bare_command_prints_its_help_as_it_is() -> None:
    ran = subprocess.run([sys.executable, "-m", "deploy.cli"], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 2 and ran.stdout.startswith("Usage: headrace [OPTIONS] COMMAND") and ran.stderr == ""


def a_run_file(folder: Path, **changes: Any) -> Path:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    content = {"run_dir": str(folder / "run"), "model": str(model), "learner": {"steps": 5, "data": {"prompts": str(folder / "prompts.jsonl")}}, "rollout": {}, "reward": {"scorers": [{"name": "a", "use": "exact"}]}}
    file = folder / "run.yaml"
    file.write_text(json.dumps({**content, **changes}))
    return file


def test_validate_looks_at_the_models_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(a_run_file(tmp_path))])
    assert result.exit_code == 2 and "the folder has no *.safetensors, hence no weights" in result.output and "hence no tokenizer" in result.output


def test_a_model_that_is_no_folder_is_said_to_be_taken_for_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    result = CliRunner().invoke(app, ["validate", str(a_run_file(tmp_path, model="someone/model"))])
    assert result.exit_code == 0 and "model=someone/model is no folder here: taken for a hub id" in result.stderr


def test_a_launch_ends_with_how_far_it_came_and_what_is_next(tmp_path: Path) -> None:
    run = load(a_run_file(tmp_path, model="someone/model"))
    assert last_words(run) == f"step 0 of 5; run folder {run.run_dir}; next: {run.run_dir}/logs says why, the same command goes on"
    assert last_words(run, is_mistaken=True).endswith(f"next: {run.run_dir}/logs says why, then the same command")
    run.run_dir.mkdir()
    (run.run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4, 5)))
    assert last_words(run) == f"step 5 of 5; run folder {run.run_dir}; next: `headrace report {run.run_dir}`"
    assert of_learner(run.learner) == f"the learner has left after step 5 of 5; run folder {run.run_dir}; next: headrace report {run.run_dir}"
    limited = run.model_copy(update={"learner": run.learner.model_copy(update={"steps": 9, "max_minutes": 7.0})})
    assert last_words(limited) == f"step 5 of 9 (its limit of 7 minutes, or it was stopped); run folder {run.run_dir}; next: `headrace report {run.run_dir}`, the same command goes on"


def test_values_of_set_are_yaml_and_exponents_are_numbers() -> None:
    assert parse_sets(["a.b=1e-5", "c=true", "d=[1, 2]", "e=x:y"]) == {"a.b": 1e-5, "c": True, "d": [1, 2], "e": "x:y"}


def test_flags_go_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "reward.yaml"
    file.write_text("workers: 2\nscorers: [{name: a, use: exact}]\n")
    config = resolve("reward_server", file, {"workers": 3, "address": None, "scorers": []}, ["max_pending=7"]).model_dump()
    assert (config["workers"], config["max_pending"], config["scorers"][0]["use"]) == (3, 7, "exact")


def test_a_mistake_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "reward.yaml"
    file.write_text("scorers: []\n")
    with pytest.raises(Mistakes, match=f"{file}: scorers: "):
        resolve("reward_server", file, {}, [])


def test_a_scorer_flag_may_name_a_function() -> None:
    assert parse_scorers(["mine=package.module:score"]) == [{"name": "mine", "use": "package.module:score"}]


def test_the_status_of_a_run_at_rest_is_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "gateway.address").write_text("127.0.0.1:9")
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "version": 7}\n{"step": 7, "ver')
    ran = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert ran.exit_code == 0 and "its last step was 6, version 7" in ran.output
    (tmp_path / "metrics.jsonl").write_text("")
    ran = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert ran.exit_code == 2 and "no learner answers on 127.0.0.1:9" in ran.output
