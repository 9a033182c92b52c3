"""How often three layers are compiled for rows of one length: `python -m tests.learner.trainer.compiled_rows` prints a JSON line."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig

from learner.trainer.engine import Engine, hidden_states, layers_of, prepare_layers
from learner.trainer.loading import from_config_on_meta, materialize
from learner.trainer.packing import WeightedSample, pack
from tests.learner.trainer import rig


def model(**changes: Any) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    made = from_config_on_meta(LlamaConfig(**{**sizes, **changes}), torch.float32)
    materialize(made, torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def main() -> None:
    counter, compile_ = CompileCounter(), torch.compile
    plain, fast = model(), model()
    engine = Engine(attention="flex", compile=True, unit_tokens=128)
    torch.compile = lambda function, **options: compile_(function, **{"backend": counter, **options})  # type: ignore[assignment]
    prepare_layers(layers_of(fast), engine)
    torch.compile = compile_  # the kernel itself, uncompiled here, calls it too
    differences = []
    with torch.no_grad():
        for seed in range(3):
            for row in pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(6, 4, seed=seed)], row_tokens=100, share_prefix=True):
                differences.append(float((hidden_states(fast.base_model, row, engine, ()) - hidden_states(plain.base_model, row, Engine(), ())).abs().max()))
    print(json.dumps({"compilations": counter.frame_count, "rows": len(differences), "difference": max(differences)}))


if __name__ == "__main__":
    main()
