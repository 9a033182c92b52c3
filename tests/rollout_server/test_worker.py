"""What is added to vLLM's worker, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
