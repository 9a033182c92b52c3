"""What the engine makes of its settings, and that another row is no other program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig

from learner.config import TrainerConfig
from learner.trainer.engine import (
    Engine,
    engine_of,
    fitted,
    hidden_states,
    layers_of,
    pairs_per_token,
    prepare_layers,
    unit_of,
)
from learner.trainer.loading import from_config_on_meta, materialize
from learner.trainer.packing import WeightedSample, pack
from tests.learner.trainer import rig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def model(**changes: Any) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    made = from_config_on_meta(LlamaConfig(**{**sizes, **changes}), torch.float32)
    materialize(made, CPU)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


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


def test_layers_are_compiled_once_for_all_rows_of_a_length_and_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, compile_ = CompileCounter(), torch.compile
    dynamo: Any = torch._dynamo.config
    monkeypatch.setattr(dynamo, "disable", False)  # tests/conftest.py turns it off, for vLLM's sake
    plain, fast = model(), model()
    engine = Engine(attention="flex", compile=True, unit_tokens=128)
    with monkeypatch.context() as patch:  # the kernel itself, uncompiled here, calls torch.compile too
        patch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=counter, **options))
        prepare_layers(layers_of(fast), engine)
    with torch.no_grad():
        for seed in range(3):
            for row in pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(6, 4, seed=seed)], row_tokens=100, share_prefix=True):
                torch.testing.assert_close(hidden_states(fast.base_model, row, engine, ()), hidden_states(plain.base_model, row, Engine(), ()))
    assert counter.frame_count == 1  # for three layers and every row
