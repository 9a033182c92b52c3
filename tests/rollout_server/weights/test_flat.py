"""The plan of direct copies against a small model that is fused, cut and padded as vLLM's are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.layout import Engine, place_of
from protos.weights.staging import Staging, VerifiedStaging, digest
from rollout_server.weights.flat import NotPlain, make_plan

ENGINE = Engine(num_heads=2, num_kv_heads=1, head_dim=4, intermediate=6, vocabulary=5)
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (5, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8), "model.layers.0.self_attn.o_proj.weight": (8, 8), "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.up_proj.weight": (6, 8), "model.layers.0.mlp.down_proj.weight": (8, 6), "model.norm.weight": (8,),
}  # fmt: skip
FUSED = {
    "model.embed_tokens.weight": (64, 8), "model.layers.0.self_attn.qkv_proj.weight": (16, 8), "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_up_proj.weight": (12, 8), "model.layers.0.mlp.down_proj.weight": (8, 6), "model.norm.weight": (8,),
}  # fmt: skip


def served(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    root = nn.Module()
    for name, shape in shapes.items():
        module = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(leaf, nn.Parameter(torch.zeros(shape), requires_grad=False))
    return root


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def load(model: nn.Module, tensors: dict[str, torch.Tensor], engine: Engine = ENGINE) -> None:
    """What an engine's loader does, by names and slices written out."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        place = place_of(name, tuple(tensor.shape), engine)
        assert place is not None
        part = tensor.reshape(len(tensor), -1)[place.first : place.first + place.count, place.first_column : place.first_column + place.columns]
        target = parameters[place.parameter].data
        target.view(len(target), -1)[place.row : place.row + place.count].copy_(part)


def staged(tensors: dict[str, torch.Tensor]) -> VerifiedStaging:
    manifest = manifest_pb2.Manifest(version=2)
    for index, (name, tensor) in enumerate(tensors.items()):
        data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        manifest.tensors.add(name=name, shape=tensor.shape, dtype="float32")
        manifest.buckets.add(num_bytes=data.size)
        manifest.slices.add(tensor=index, num_bytes=data.size, bucket=index, digest=digest(data))
    staging = Staging(manifest)
    for index, tensor in enumerate(tensors.values()):
        staging.write_bucket(index, tensor.contiguous().view(-1).view(torch.uint8).clone())
    return staging.verify()


def test_the_plan_writes_what_the_loader_writes_and_leaves_the_padding_alone() -> None:
    by_loader, by_plan = served(FUSED), served(FUSED)
    load(by_plan, checkpoint(1))
    plan = make_plan(by_plan, SHAPES, ENGINE)
    plan.check(checkpoint(1).items())
    load(by_loader, checkpoint(2))
    plan.prepare(staged(checkpoint(2)))()
    assert all(torch.equal(a, b) for a, b in zip(by_loader.parameters(), by_plan.parameters(), strict=True))
    assert not by_plan.get_parameter("model.embed_tokens.weight")[5:].any()


def test_a_loader_that_puts_a_tensor_elsewhere_is_found_out_before_the_plan_is_used() -> None:
    model, tensors = served(FUSED), checkpoint(1)
    load(model, tensors)
    fused = model.get_parameter("model.layers.0.self_attn.qkv_proj.weight")
    fused[[8, 12]] = fused[[12, 8]].clone()  # the first rows of k and v
    with pytest.raises(NotPlain, match=r"the loader put other bytes into model.layers.0.self_attn.qkv_proj.weight than model.layers.0.self_attn.k_proj.weight holds"):
        make_plan(model, SHAPES, ENGINE).check(tensors.items())


def test_a_parameter_that_nothing_writes_is_not_plain() -> None:
    with pytest.raises(NotPlain, match=r"parameter model.scale is covered in 0 of 3 rows"):
        make_plan(served({**FUSED, "model.scale": (3,)}), SHAPES, ENGINE)
    with pytest.raises(NotPlain, match=r"qkv_proj.weight: rows 8 to 12 are written by nothing"):  # faults.md 5
        make_plan(served(FUSED), {name: shape for name, shape in SHAPES.items() if "k_proj" not in name}, ENGINE)


def test_packed_or_transposed_parameters_and_unknown_names_are_not_plain() -> None:
    with pytest.raises(NotPlain, match=r"down_proj.weight of shape \(6, 8\) does not hold 8 rows of 6"):
        make_plan(served({**FUSED, "model.layers.0.mlp.down_proj.weight": (6, 8)}), SHAPES, ENGINE)
    with pytest.raises(NotPlain, match="model.layers.0.mlp.router.weight has no known place"):
        make_plan(served(FUSED), {**SHAPES, "model.layers.0.mlp.router.weight": (4, 8)}, ENGINE)
    with pytest.raises(NotPlain, match="does not say its heads"):
        make_plan(served(FUSED), SHAPES, None)


def test_some_tensors_alone_leave_the_other_parameters_as_they_are() -> None:
    model, tensors = served(FUSED), checkpoint(1)
    load(model, tensors)
    plan, new = make_plan(model, SHAPES, ENGINE), checkpoint(2)["model.layers.0.self_attn.k_proj.weight"]
    plan.prepare_some([("model.layers.0.self_attn.k_proj.weight", new)])()
    expected = served(FUSED)
    load(expected, {**tensors, "model.layers.0.self_attn.k_proj.weight": new})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    with pytest.raises(NotPlain, match="the plan does not know model.other"):
        plan.prepare_some([("model.other", new)])


def test_a_version_with_a_tensor_less_is_refused_before_the_pause() -> None:
    plan = make_plan(served(FUSED), SHAPES, ENGINE)
    tensors = checkpoint(2)
    del tensors["model.norm.weight"]
    with pytest.raises(NotPlain, match="version 2 brings 8 of 9 tensors"):
        plan.prepare(staged(tensors))
