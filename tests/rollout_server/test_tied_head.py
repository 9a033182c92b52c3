"""A tied head is one tensor, whatever the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout_server.checkpoint import expected_tensors


def folder_with(path: Path, head: torch.Tensor, *, tied: bool) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    save_file({"model.embed_tokens.weight": torch.ones(4, 2), "lm_head.weight": head}, path / "model.safetensors")
    return path


def test_two_equal_copies_are_one_tensor_and_two_different_ones_are_refused(tmp_path: Path) -> None:  # faults.md 2
    assert expected_tensors(folder_with(tmp_path / "equal", torch.ones(4, 2), tied=True)) == [("model.embed_tokens.weight", (4, 2))]
    with pytest.raises(ValueError, match="ties lm_head.weight to model.embed_tokens.weight, but the files hold two different tensors; remove lm_head.weight"):
        expected_tensors(folder_with(tmp_path / "different", torch.zeros(4, 2), tied=True))
    assert len(expected_tensors(folder_with(tmp_path / "untied", torch.zeros(4, 2), tied=False))) == 2
