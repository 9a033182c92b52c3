"""What the engine makes of its settings, and that another row is no other program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config import TrainerConfig
from learner.trainer.engine import Engine, engine_of, fitted, pairs_per_token, unit_of
from tests.learner.trainer.compiled_rows import model

ROOT = Path(__file__).resolve().parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_device_gets_what_pays_there() -> None:
    assert engine_of(TrainerConfig(), CPU) == Engine(attention="pieces", compile=False, unit_tokens=256, reshard=False)
    assert engine_of(TrainerConfig(row_tokens=16_384), CUDA) == Engine(attention="flex", compile=True, unit_tokens=2048, reshard=False)
    assert engine_of(TrainerConfig(ranks=2), CUDA).reshard and engine_of(TrainerConfig(recompute="full"), CUDA).reshard
    assert engine_of(TrainerConfig(attention="pieces"), CUDA).compile is False


@pytest.mark.parametrize(("settings", "says"), [({"attention": "flex"}, "trainer.attention=flex on a CPU"), ({"compile": True}, "trainer.compile=true on a CPU"), ({"offload": True}, "trainer.offload=true on a CPU")])
def test_what_needs_cuda_is_refused_on_a_cpu(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine_of(TrainerConfig(**settings), CPU)


def test_rows_are_filled_up_to_few_lengths() -> None:
    # an eighth of 2,000 is 250: two blocks of 128
    assert [unit_of(n) for n in (1, 2000, 16_384)] == [128, 256, 2048]
    engine = Engine(attention="flex", unit_tokens=256)
    assert [engine.length_of(n) for n in (1, 256, 257)] == [256, 256, 512] and Engine().length_of(257) == 257


def test_heads_too_narrow_for_the_kernel_are_computed_in_pieces() -> None:
    wide = Engine(attention="flex", compile=True, recompute="full")
    assert fitted(wide, model()) == wide
    assert fitted(wide, model(head_dim=8)) == Engine(attention="pieces", recompute="full")


def test_a_token_is_worth_so_many_pairs() -> None:
    # a layer here: (4 + 2 + 2 + 4) 16 · 64 + 3 · 64 · 64 + two norms of 64 = 24,704 weights; / (2 · 4 heads · 16)
    assert pairs_per_token(model()) == 193


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layers_are_compiled_once_for_all_rows_of_a_length_and_answer_the_same() -> None:
    # in a process of its own, since tests/conftest.py turns compilation off in this one
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    seen = subprocess.run([sys.executable, "-m", "tests.learner.trainer.compiled_rows"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=True)
    found = json.loads(seen.stdout.splitlines()[-1])
    assert found["compilations"] == 1 and found["rows"] >= 3  # for three layers and every row
    assert found["difference"] < 1e-5
