"""Which GPUs a launcher may give away on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import gpus_here
from deploy.launch import launch
from deploy.processes import environment_of
from deploy.schema import RunFile, parse


def run_of(tmp_path: Path, **placement: Any) -> RunFile:
    """Two replicas."""
    model, prompts = tmp_path / "model", tmp_path / "train.jsonl"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    prompts.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    content = {
        "run_dir": str(tmp_path / "run"), "model": str(model), "learner": {"data": {"prompts": str(prompts), "max_prompt_tokens": 100}, "sampling": {"max_new_tokens": 28}, "scorer": "answer", "trainer": {"ranks": len(placement.get("learner_gpus", [0]))}},
        "rollout": {"max_model_len": 128, "replicas": 2}, "reward": {"scorers": [{"name": "answer", "use": "last_number"}]}, "placement": placement,
    }  # fmt: skip
    return parse(content, where="run.yaml")


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, names: list[str], shown: str | None = None) -> None:
    """A /dev of these names."""
    for name in names:
        (folder / name).touch()
    monkeypatch.setattr(gpus_here, "_DEVICES", folder)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)


def test_a_run_that_wants_one_gpu_more_than_there_are_ends_at_once_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # faults.md 129: two GPUs are here (nvidiactl is none), three are asked for
    machine(monkeypatch, tmp_path, ["nvidia0", "nvidia1", "nvidiactl"])
    with pytest.raises(ValueError, match=r"placement.learner_gpus wants 3 GPUs, among them number 2; 2 are here \(/dev/nvidia\*\): number 0 to 1; take fewer, or show more"):
        launch(run_of(tmp_path, learner_gpus=[0, 1, 2]), on_event=print)
    assert not (tmp_path / "run").exists()  # nothing was begun
    gpus_here.check_gpus(run_of(tmp_path, learner_gpus=[0], rollout_gpus=[[0], [1]]))


@pytest.mark.parametrize(("shown", "said"), [("4,5", r"2 are here \(CUDA_VISIBLE_DEVICES=4,5\): number 0 to 1"), ("", r"0 are here \(CUDA_VISIBLE_DEVICES=\): none")])
def test_what_the_environment_shows_bounds_what_can_be_given_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, said: str) -> None:
    machine(monkeypatch, tmp_path, [f"nvidia{number}" for number in range(8)], shown)
    with pytest.raises(ValueError, match=rf"placement.rollout_gpus wants 2 GPUs, among them number .*; {said}"):
        gpus_here.check_gpus(run_of(tmp_path, rollout_gpus=[[2], [3]]))


def test_where_nothing_tells_how_many_there_are_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, ["dxg"])
    gpus_here.check_gpus(run_of(tmp_path, learner_gpus=[3]))


@pytest.mark.parametrize(("shown", "expected"), [(None, "1,0"), ("4,5", "5,4"), ("GPU-aa,GPU-bb", "GPU-bb,GPU-aa")])
def test_a_service_sees_the_gpus_that_the_launcher_was_given_by_number_or_by_uuid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, expected: str) -> None:
    # faults.md 130: number 1 is the second of those that are shown, not the machine's own number 1
    machine(monkeypatch, tmp_path, [], shown)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    environment = environment_of((1, 0))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == (expected, "PCI_BUS_ID")
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(())
