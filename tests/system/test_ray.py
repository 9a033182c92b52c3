"""A whole run on a Ray cluster of two nodes of this machine, one of which dies (small engine; everything else is real)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.audit.program import audit
from deploy.demo import sorting
from deploy.progress import read_all, surviving
from tests.system.harness import ROOT, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PLACE = {"node_group": "here"}


def content(folder: Path, model: Path, *, steps: int, **rollout: Any) -> dict[str, Any]:
    prompts = folder / "train.jsonl"
    digits = sorting.training(200, seed=0, excluded=[])
    prompts.write_text("".join(json.dumps({"prompt": sorting.prompt(each), "answer": sorting.answer(each)}) + "\n" for each in digits))
    return {
        "run_dir": str(folder / "run"), "model": str(model),
        "cluster": {"node_groups": [{"name": "here", "count": 2, "gpus_per_node": 0}], "ray": {"local_nodes": 2}},
        "roles": {"actor": PLACE, "rollout": {**PLACE, "parallelism": {"data": 2}}, "reward_model": PLACE},
        "learner": {
            "steps": steps, "groups_per_step": 2, "sampling": {"group_size": 4, "max_new_tokens": 5}, "optimizer": {"lr": 1e-4},
            "trainer": {"threads": 1, "device": "cpu"}, "checkpoint": {"every_steps": 5}, "data": {"prompts": str(prompts), "template": "raw"},
        },
        "rollout": {"engine": "small", "max_model_len": 64, "threads": 1, **rollout},
        "reward": {"scorers": [{"name": "sorted", "use": "deploy.demo.sorting:score"}]},
    }  # fmt: skip


def launched(folder: Path, run: dict[str, Any], *, backend: str = "ray", env: Mapping[str, str] = {}) -> tuple[subprocess.Popen[str], Path]:
    """`headrace launch`, and the file with what it says."""
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    said = folder / "said"
    command = [sys.executable, "-m", "deploy.cli", "launch", str(folder / "run.yaml"), "--backend", backend]
    with said.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, text=True, start_new_session=True, env={**os.environ, **env}), said


def steps_made(run_dir: Path) -> int:
    return len(surviving(read_all(run_dir / "metrics.jsonl")))


def left_behind(folder: Path) -> list[str]:
    """Command lines of living processes of this run, or of a cluster of ours."""
    lines = [file.read_bytes().replace(b"\0", b" ").decode(errors="replace") for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    return [line for line in lines if str(folder) in line and "pytest" not in line]


def test_a_run_goes_on_when_a_raylet_is_killed_and_its_audit_is_clean(tiny_model: Path, tmp_path: Path) -> None:
    launcher, said = launched(tmp_path, content(tmp_path, tiny_model, steps=400))
    try:
        wait_for("five steps", lambda: steps_made(tmp_path / "run") >= 5, limit_s=200, guard=lambda: alive(launcher, said))
        raylet = re.search(r"127\.0\.0\.3 \(raylet (\d+)\)", said.read_text())
        assert raylet is not None, said.read_text()
        os.kill(int(raylet[1]), signal.SIGKILL)
        lost = wait_for("the loss to be told", lambda: re.findall(r"^(\S+) died \(its actor or its machine was lost", said.read_text(), re.M), limit_s=60)
        wait_for("the lost services elsewhere", lambda: all(re.search(rf"was lost[\s\S]*{name} serves on 127\.0\.0\.2:", said.read_text()) for name in lost), limit_s=120, guard=lambda: alive(launcher, said))
        now = steps_made(tmp_path / "run")
        wait_for("five more steps", lambda: steps_made(tmp_path / "run") >= now + 5, limit_s=120, guard=lambda: alive(launcher, said))
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(90) == 130, said.read_text()
    finally:
        launcher.kill()
    outcome = audit(tmp_path / "run")
    assert not outcome.findings.found, outcome.findings.found
    assert not left_behind(tmp_path)
    assert (tmp_path / "run" / "logs" / "rollout-0.log").stat().st_size, "logs come from the nodes into the run folder"


def alive(launcher: subprocess.Popen[str], said: Path) -> None:
    assert launcher.poll() is None, said.read_text()


def test_ranks_on_two_machines_train_together(tiny_model: Path, tmp_path: Path) -> None:
    """One rank on each node, kept by a torchrun there, beside a gateway alone."""
    run = content(tmp_path, tiny_model, steps=4)
    run["roles"]["actor"] = {"node_group": "here", "num_nodes": 2, "parallelism": {"shard": 2}}
    launcher, said = launched(tmp_path, run)
    try:
        assert launcher.wait(300) == 0, said.read_text()
    finally:
        launcher.kill()
    text = said.read_text()
    assert "step 4 of 4" in text.splitlines()[-1], text
    logs = {name: (tmp_path / "run" / "logs" / f"{name}.log").read_text() for name in ("ranks-0", "ranks-1")}
    assert all(logs.values()), "each torchrun says something"
    assert not audit(tmp_path / "run").findings.found and not left_behind(tmp_path)
