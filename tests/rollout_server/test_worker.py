"""What is added to vLLM's worker, without an engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.staging import VerifiedStaging, digest
from rollout_server import worker
from rollout_server.worker import WorkerExtension


def test_settling_anew_how_updates_are_applied_keeps_the_groups_of_the_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The trainer keeps its end of a group while the group key is unchanged: a worker that let go of its own would wait for ever.
    monkeypatch.setattr(worker, "_tensor_parallel", lambda: (1, 0))
    monkeypatch.setattr(worker, "_number", lambda: 0)
    monkeypatch.setattr(worker, "_make_room_between_parts", lambda runner: None)
    (tmp_path / "config.json").write_text(json.dumps({}))
    extension = WorkerExtension()
    extension.device = torch.device("cpu")
    extension.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(1, 1))
    assert extension.headrace_prepare(str(tmp_path), {}, True) == "on a CPU the engine packs its weights"
    landing = extension._headrace_landing()
    assert extension.headrace_prepare(str(tmp_path), {}, False) == "apply: loader is configured"
    assert extension._headrace_landing() is landing


DATA = np.arange(8, dtype=np.uint8)


class Plan:
    """Stands for the plan of copies; says on which thread it was asked."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.applied: list[int] = []

    def prepare(self, staging: VerifiedStaging) -> Callable[[], None]:
        self.threads.append(threading.current_thread().name)
        return lambda: self.applied.append(staging.version)


def landed(folder: Path, version: int, plan: Plan | None) -> WorkerExtension:
    """A worker into which a version of one tensor has come."""
    extension = WorkerExtension()
    extension.device = torch.device("cpu")
    extension._headrace_flat = plan  # type: ignore[assignment]
    manifest = manifest_pb2.Manifest(version=version)
    manifest.tensors.add(name="w", shape=[2], dtype="float32")
    manifest.buckets.add(num_bytes=8)
    manifest.slices.add(num_bytes=8, digest=digest(DATA))
    (folder / "rank-0.bin").write_bytes(DATA.tobytes())
    extension.headrace_begin_folder(str(folder), manifest.SerializeToString())
    end = time.monotonic() + 30
    while extension.headrace_state()[0] == "receiving" and time.monotonic() < end:
        time.sleep(0.01)
    assert extension.headrace_state() == ("ready", "")
    return extension


def test_the_engine_s_thread_finds_the_copies_made_ready_and_only_carries_them_out(tmp_path: Path) -> None:
    plan = Plan()
    extension = landed(tmp_path, 4, plan)
    extension.headrace_take(4)
    assert (plan.threads, plan.applied) == (["weights-read"], [])
    extension.headrace_apply()
    assert plan.applied == [4] and extension._headrace_taken is None
    names = [name for name, _, _ in extension.headrace_marks()]
    assert names[-5:] == ["move", "place", "prepare", "apply", "apply is done"] and extension.headrace_marks() == []


def test_a_way_of_applying_that_is_chosen_after_a_version_came_counts_for_that_version_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(self: WorkerExtension, tensors: Iterator[tuple[str, Any]]) -> None:
        loaded.extend(name for name, _ in tensors)

    monkeypatch.setattr(WorkerExtension, "_headrace_load", load)
    plan = Plan()
    extension = landed(tmp_path, 4, plan)
    extension._headrace_flat = None  # as `use_loader` leaves it
    extension.headrace_take(4)
    extension.headrace_apply()
    assert loaded == ["w"] and plan.applied == []
