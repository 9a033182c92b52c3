"""The trainer process of the benchmarks: every line is answered, in whatever order they come first."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks._update_trainer import Trainer


def test_a_copy_is_measured_before_any_version_was_written(tiny_model: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_model, tmp_path, torch.device("cpu"), "gloo", 1 << 20)
    assert trainer.copy()["copy_s"] > 0
    written = trainer.write("3")
    assert written["version"] == 1 and written["num_bytes"] > 0
    assert len(trainer.logprobs("5,6,7")["logprobs"]) == 2
