"""Layers that are computed again in the backward pass: which ones, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner.trainer.engine import Engine
from learner.trainer.model import load_policy
from learner.trainer.packing import WeightedSample, pack
from tests.learner.trainer import rig
from tests.learner.trainer.gradients import whole


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with rig.group(0, 1, tmp_path_factory.mktemp("store") / "one") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rig.llama(tmp_path_factory.mktemp("model") / "llama")


def computed(folder: Path, mesh: DeviceMesh, **engine: Any) -> tuple[list[int], dict[str, Tensor]]:
    """How often each layer's first module ran in one row's forward and backward pass, and the gradient. Sharded (bfloat16) as it is on a GPU."""
    policy = load_policy(folder, mesh=mesh, compute_dtype=torch.bfloat16, temperature=rig.TEMPERATURE, engine=Engine(**engine))
    layers = [module for name, module in policy.causal_lm.named_modules() if name.rpartition(".")[0] == "model.layers"]
    counts = [0] * len(layers)

    def counter(number: int) -> Any:
        def count(*_: Any) -> None:
            counts[number] += 1

        return count

    for number, layer in enumerate(layers):
        layer.input_layernorm.register_forward_hook(counter(number))  # type: ignore[union-attr, operator]
    (row,) = pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(2, 3)], row_tokens=1000, share_prefix=True)
    policy(row).sum().backward()
    return counts, {name: whole(p.grad) for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("engine", "expected"),
    [({"recompute": "full"}, [2, 2, 2]), ({"recompute": "selective"}, [2, 1, 2]), ({"recompute": "selective", "recompute_every": 3}, [2, 1, 1])],
)
def test_the_layers_asked_for_are_computed_twice_and_the_gradient_is_the_same(engine: dict[str, Any], expected: list[int], folder: Path, mesh: DeviceMesh) -> None:
    once, plain = computed(folder, mesh)
    counts, found = computed(folder, mesh, **engine)
    assert once == [1, 1, 1] and counts == expected
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
