"""Whole runs on one machine through the public faces, with real services and the small engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import headrace
from deploy.demo import sorting
from deploy.progress import read_all, surviving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    digits = sorting.training(200, seed=0, excluded=[])
    file.write_text("".join(json.dumps({"prompt": sorting.prompt(each), "answer": sorting.answer(each)}) + "\n" for each in digits))
    return file


def learner_fields(steps: int) -> dict[str, Any]:
    return {
        "steps": steps, "groups_per_step": 2, "sampling": {"group_size": 4, "max_new_tokens": 5}, "optimizer": {"lr": 1e-4},
        "trainer": {"threads": 1, "device": "cpu"}, "checkpoint": {"every_steps": 2},
    }  # fmt: skip


SMALL = {"engine": "small", "max_model_len": 64, "threads": 1}


def test_a_trainer_with_a_python_reward_and_two_replicas_leaves_metrics_and_a_model(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    trainer = headrace.GRPOTrainer(
        model=tiny_model, prompts=prompts, reward=sorting.score, run_dir=tmp_path / "run",
        data={"template": "raw"}, rollout={**SMALL, "replicas": 2}, **learner_fields(3),
    )  # fmt: skip
    result = trainer.train()
    assert [line["step"] for line in result.metrics] == [1, 2, 3]
    assert (result.model / "model.safetensors").is_file()
    assert not processes_of(tmp_path)


def test_a_launched_run_that_is_interrupted_leaves_nothing_behind_and_goes_on_from_its_cut(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    run_dir = tmp_path / "run"
    content = {
        "run_dir": str(run_dir), "model": str(tiny_model), "rollout": SMALL,
        "learner": {**learner_fields(400), "data": {"prompts": str(prompts), "template": "raw"}},
        "reward": {"scorers": [{"name": "sorted", "use": "deploy.demo.sorting:score"}]},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "deploy.cli", "launch", str(file)]
    first = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: len(read_all(run_dir / "metrics.jsonl")) >= 5, limit_s=100)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130
    assert said.splitlines()[-1] == "headrace: stopped by SIGINT"
    assert not processes_of(tmp_path)

    made = surviving(read_all(run_dir / "metrics.jsonl"))[-1]["step"]
    second = subprocess.run([*command, "--set", f"learner.steps={made + 3}"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stderr
    assert "headrace: " not in second.stderr, "nothing went wrong, so nothing is told"
    lines = read_all(run_dir / "metrics.jsonl")
    assert surviving(lines)[-1]["step"] == made + 3
    assert [line["version"] for line in lines] == sorted({line["version"] for line in lines}), "no version is used twice"


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    lines = [file.read_bytes().replace(b"\0", b" ").decode(errors="replace") for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    return [line for line in lines if str(folder) in line and "pytest" not in line.split()[:4]]


def until(question: Any, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not question():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
