"""Every template validates, and its plan can be printed for the backend that it is written for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.cluster.fits import needs_of
from deploy.dry_run import describe
from deploy.schema import load
from deploy.serve import resolve
from rollout_server.config import RolloutConfig
from tests.templates import FOLDER, RUN_FILES, overrides


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: file.stem)
def test_a_template_validates_and_its_dry_run_places_every_process(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    run = load(file, overrides=overrides(file, tmp_path))
    backend = "ray" if run.cluster is not None and run.cluster.num_nodes > 1 else "local"
    plan = describe(run, backend)
    assert plan["processes"][0] == "learner" and sorted(one["name"] for one in plan["placed"]) == sorted(plan["processes"])
    assert all(one["machine"] and "--config" in one["command"] for one in plan["placed"])
    if run.cluster is not None:
        assert set(needs_of(run)) == set(run.cluster.gpu_groups) and "not estimated" not in plan["memory"]
        assert f"--backend {backend}" in file.read_text() or backend == "local"


@pytest.mark.parametrize("stem", ["cpu", "stage-3-64-gpus"])
def test_the_command_prints_the_same(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    backend = ["--backend", "ray"] if stem.startswith("stage") else []
    result = CliRunner().invoke(app, ["launch", str(FOLDER / f"{stem}.yaml"), "--dry-run", *backend])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["placed"]


def test_the_road_counts_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    found = {}
    for file in RUN_FILES:
        if file.stem.startswith("stage-"):
            cluster = load(file).cluster
            assert cluster is not None
            found[file.stem] = sum(group.count * group.gpus_per_node for group in cluster.node_groups)
    # The road: 4 to 8, then 2 to 4 machines, 32 to 64, 128 and more.
    assert found == {"stage-1-one-machine": 8, "stage-2-few-machines": 32, "stage-3-64-gpus": 64, "stage-4-128-gpus": 128}


def test_a_far_replica_is_a_replicas_configuration(tmp_path: Path) -> None:
    file = FOLDER / "far-replica.yaml"
    config = resolve("rollout_server", file, overrides(file, tmp_path), [])
    assert isinstance(config, RolloutConfig) and config.deltas and config.learner
    run = load(FOLDER / "far-rollout.yaml", overrides=overrides(FOLDER / "far-rollout.yaml", tmp_path))
    assert (config.model, config.dtype, config.max_model_len) == (run.model, run.rollout.dtype, run.rollout.max_model_len)


def test_ranks_on_several_machines_are_kept_by_torchrun_beside_a_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    plan = describe(load(FOLDER / "stage-3-64-gpus.yaml"), "ray")
    commands = {one["name"]: one["command"] for one in plan["placed"]}
    assert "-m learner --gateway-only" in commands["learner"]
    assert "--nnodes 4 --nproc-per-node 8" in commands["ranks-3"] and "--rdzv-endpoint <ranks-0>" in commands["ranks-3"] and "--gateway <learner>" in commands["ranks-3"]
    assert "NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5 HEADRACE_LOG_LEVEL=info " in commands["ranks-0"]
    assert " python -m torch.distributed.run --nnodes 4" in commands["ranks-0"]
    assert plan["before"][0] == "train-0: ray start --head --port 6379 --num-gpus 8 --resources '{\"headrace-train\": 1}'" and len(plan["before"]) == 8
