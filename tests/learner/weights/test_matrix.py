"""Every model family × ranks × replicas, pushed in one process through the real plan, manifest and staging to receivers that record.

Trainer ranks are played from the plan: rank r's file is made of exactly the boxes that FSDP2 gives it. Every second replica is one of
two tensor-parallel workers, which keep their own parts. What arrives is held against the model, and, put where the engine's layout
says, against q, k, v and gate, up concatenated and cut. `-s` prints every cell; test_matrix_pushed.py sends the same cells over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from learner.weights.announce import manifest_of
from learner.weights.placement import Split, held
from learner.weights.plan import TensorSpec, TransferPlan, make_plan
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.layout import Engine, engine_of, place_of
from protos.weights.staging import Keep, Staging, VerifiedStaging, digest

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67}
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),  # biases of q, k and v
    "qwen3": (Qwen3Config, {}),  # norms of q and k
    "qwen3-biases": (Qwen3Config, {"attention_bias": True}),
    "gemma": (GemmaConfig, {}),
    "gemma-biases": (GemmaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {}),  # its architecture has no biases
}
RANKS, REPLICAS = (1, 2, 4), (1, 2, 3)
BUCKET_BYTES = 1500


@cache
def model(family: str, tied: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters of a random tiny model, ties once, in bfloat16; and its configuration."""
    kind, more = MODELS[family]
    sizes = dict(SIZES)
    if kind is Qwen2Config:
        sizes["hidden_size"] = 32  # its head_dim follows from it
    torch.manual_seed(7)
    net = AutoModelForCausalLM.from_config(kind(**sizes, **more, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_()
    return {name: p.detach().bfloat16() for name, p in net.named_parameters()}, net.config.to_dict()


def files_of(plan: TransferPlan, tensors: list[torch.Tensor]) -> list[bytes]:
    """What each rank would write: its boxes, dense."""
    files = [bytearray() for _ in range(plan.num_owners)]
    for run in plan.runs:
        box = tuple(slice(first, first + count) for first, count in run.box)
        assert len(files[run.owner]) == run.file_offset
        files[run.owner] += tensors[run.tensor][box].contiguous().view(torch.uint8).numpy().tobytes()
    return [bytes(file) for file in files]


def keep_of(engine: Engine) -> Keep:
    """A worker's own parts."""

    def part(name: str, shape: tuple[int, ...], itemsize: int) -> Any:
        place = place_of(name, shape, engine)
        assert place is not None, name
        return place.part(shape, itemsize)

    return part


def manifest_with_digests(plan: TransferPlan, files: list[bytes]) -> manifest_pb2.Manifest:
    digests: list[list[int]] = [[] for _ in range(plan.num_owners)]
    for piece in plan.slices:
        start = plan.buckets[piece.bucket].file_offset + piece.bucket_offset
        digests[piece.owner].append(digest(np.frombuffer(files[piece.owner], dtype=np.uint8)[start : start + piece.num_bytes]))
    return manifest_of(plan, policy_step=3, digests=digests)


def receive(plan: TransferPlan, files: list[bytes], engines: list[Engine | None]) -> list[VerifiedStaging]:
    """Sends every bucket once to each receiver, in the order of the plan. An engine: that worker's parts alone."""

    def dense(bucket: int, offset: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        part = plan.buckets[bucket]
        return np.frombuffer(files[part.owner], dtype=np.uint8)[part.file_offset + offset : part.file_offset + offset + size]

    manifest = manifest_with_digests(plan, files)
    receivers = [Staging(manifest, keep=keep_of(engine) if engine else None) for engine in engines]
    for index, bucket in enumerate(plan.buckets):
        data = torch.from_numpy(dense(index, 0, bucket.num_bytes).copy())
        for receiver in receivers:
            receiver.write_bucket(index, data)
    return [receiver.verify() for receiver in receivers]


def image(staging: VerifiedStaging, shapes: dict[str, tuple[int, ...]], engine: Engine) -> dict[str, torch.Tensor]:
    """The engine's parameters, filled by the layout alone; rows of padding stay 0."""
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, dtype, part, data in staging.parts():
        place = place_of(name, shapes[name], engine)
        assert place is not None
        pieces.setdefault(place.parameter, []).append((place.row, data.view(dtype).reshape(part.num_rows, -1)))
    return {name: torch.cat([data for _, data in sorted(found, key=lambda item: item[0])]) for name, found in pieces.items()}


def expected(tensors: dict[str, torch.Tensor], engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The same by torch's own words: concatenate what is fused, chunk it over two workers."""

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(engine.num_workers, dim)[engine.worker]

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(len(tensor), -1)

    for leaf in ("weight", "bias"):
        attention, mlp = ([f"model.layers.0.{block}.{name}.{leaf}" for name in names] for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))))
        for names, fused in ((attention, f"model.layers.0.self_attn.qkv_proj.{leaf}"), (mlp, f"model.layers.0.mlp.gate_up_proj.{leaf}")):
            if names[0] in tensors:
                yield fused, torch.cat([rows(cut(tensors[name], 0)) for name in names])
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        yield name, cut(tensors[name], 1)
    embedding = tensors["model.embed_tokens.weight"]  # 67 rows, padded to 128: 64 and 3
    yield "model.embed_tokens.weight", embedding if engine.num_workers == 1 else embedding[64 * engine.worker : 64 * engine.worker + 64]
    yield "model.norm.weight", rows(tensors["model.norm.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", list(MODELS))
def test_every_replica_gets_every_byte_and_the_engine_s_image_is_the_model(family: str, tied: bool) -> None:
    named, config = model(family, tied)
    alone = engine_of(config)
    assert alone is not None
    assert ("lm_head.weight" in named) == (not tied)  # faults.md 1
    ran = []
    for num_ranks in RANKS:
        plan, files = cut(named, num_ranks)
        for num_replicas in REPLICAS:
            engines = engines_of(config, num_replicas)
            for engine, staging in zip(engines, receive(plan, files, engines), strict=True):
                check(named, plan, staging, engine, alone)
            ran.append((num_ranks, num_replicas))
            print(f"{family} {'tied' if tied else 'untied'} {num_ranks} x {num_replicas}: {plan.total_bytes} bytes in {len(plan.buckets)} buckets to {len(engines)} workers")
    assert ran == list(product(RANKS, REPLICAS))


def test_the_cells_are_every_family_tied_and_untied_with_biases_where_there_are_any() -> None:
    assert {name.partition("-")[0] for name in MODELS} == {"llama", "qwen2", "qwen3", "gemma", "mistral"}
    for tied in (True, False):
        biased = {name for name in MODELS if any(parameter.endswith(".bias") for parameter in model(name, tied)[0])}
        assert biased == {"llama-biases", "qwen2", "qwen3-biases", "gemma-biases"}
    assert len(MODELS) * 2 * len(RANKS) * len(REPLICAS) == 144


def cut(named: dict[str, torch.Tensor], num_ranks: int) -> tuple[TransferPlan, list[bytes]]:
    """The plan of so many FSDP2 ranks, and what each would write."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    boxes = [[held(shape, (num_ranks,), (rank,), [Split(dim=0)]) for rank in range(num_ranks)] for shape in shapes.values()]
    plan = make_plan([TensorSpec(name=name, shape=shapes[name], dtype="bfloat16", itemsize=2) for name in named], boxes, bucket_bytes=BUCKET_BYTES)
    files = files_of(plan, list(named.values()))
    assert sum(map(len, files)) == plan.total_bytes
    return plan, files


def engines_of(config: dict[str, Any], num_replicas: int) -> list[Engine | None]:
    """The workers of the replicas: one each (None), every second replica two tensor-parallel ones."""
    two = [engine_of(config, num_workers=2, worker=worker) for worker in range(2)]
    return [engine for replica in range(num_replicas) for engine in (two if replica % 2 else [None])]


def check(named: dict[str, torch.Tensor], plan: TransferPlan, staging: VerifiedStaging, engine: Engine | None, alone: Engine) -> None:
    """What one worker received is the model, or its own parts of it, where the engine wants them."""
    if engine is None:
        assert all(torch.equal(tensor, named[name]) for name, tensor in staging.tensors())
    found = image(staging, {name: tuple(tensor.shape) for name, tensor in named.items()}, engine or alone)
    for name, tensor in expected(named, engine or alone):
        assert torch.equal(found[name], tensor), (plan.num_owners, engine, name)
    if engine is not None:
        assert staging.num_bytes < 0.75 * plan.total_bytes  # its own parts, not the model
