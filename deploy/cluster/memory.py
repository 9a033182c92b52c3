"""How much memory of a GPU each role takes: an estimate, every term with its arithmetic. Pure.

Training: FSDP2 keeps weights, gradients and AdamW's two moments in float32, a share of them on each rank (learner/trainer/model.py), and gathers one layer after
another, or all of them, in compute_dtype. Activations of a layer without recomputation: 34 bytes a token and hidden unit in 16 bits (Korthikanti et al. 2022,
Reducing Activation Recomputation, section 4.1; without its attention matrix, which no kernel here keeps).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.cluster.shape import BYTES, Shape
from learner.config import LearnerConfig
from rollout_server.config import RolloutConfig

GIB = float(1 << 30)
ACTIVATION_BYTES = 34  # a token and hidden unit of one layer, 16 bits
OVERHEAD_GIB = 2.0  # CUDA's context, NCCL's buffers, fragmentation
GPU_GIB = {"a100-40": 40.0, "a100-80": 80.0, "h100": 80.0, "h200": 141.0, "b200": 180.0, "l40s": 48.0, "other": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of what a GPU holds. Example: `Term(name="gradients", gib=1.5, words="4 B x 13.0 B / 32 ranks")`"""

    name: str
    gib: float
    words: str  # the arithmetic


def total(terms: Sequence[Term]) -> float:
    """GiB of all terms."""
    return sum(term.gib for term in terms)


def words_of(terms: Sequence[Term]) -> str:
    """One line: each term with its arithmetic, and the sum."""
    return " + ".join(f"{term.name} {term.gib:.1f} ({term.words})" for term in terms) + f" = {total(terms):.1f} GiB"


def trained(learner: LearnerConfig, actor: Shape, critic: Shape | None, ranks: int) -> list[Term]:
    """Of one GPU of the learner's ranks. critic: None where the algorithm has none."""
    terms = list(_model("actor", learner, actor, ranks))
    if critic is not None:
        terms += _model("critic", learner, critic, ranks)
    for name, offload in _frozen(learner):
        terms.append(Term(name=name, gib=0.0 if offload else 4 * actor.parameters / ranks / GIB, words="offloaded" if offload else f"4 B x {_b(actor.parameters)} / {ranks}"))
    terms += _activations(learner, actor)
    terms.append(Term(name="buckets of the push", gib=2 * learner.push.bucket_bytes / GIB, words=f"2 x {learner.push.bucket_bytes >> 20} MiB"))
    terms.append(Term(name="CUDA and NCCL", gib=OVERHEAD_GIB, words="by experience"))
    return terms


def _model(name: str, learner: LearnerConfig, shape: Shape, ranks: int) -> Iterator[Term]:
    trainer, size = learner.trainer, _b(shape.parameters)
    resting = 0.0 if trainer.offload else 1.0
    moved = " (offloaded)" if trainer.offload else ""
    if trainer.lora is not None and name == "actor":
        yield Term(name="actor weights", gib=resting * 4 * shape.parameters / ranks / GIB, words=f"4 B x {size} / {ranks}; adapters' own are left out{moved}")
    else:
        for what, width in (("weights", 4), ("gradients", 4), ("AdamW's moments", 8)):
            yield Term(name=f"{name} {what}", gib=resting * width * shape.parameters / ranks / GIB, words=f"{width} B x {size} / {ranks}{moved}")
    reshard = trainer.reshard if trainer.reshard is not None else ranks > 1 or trainer.recompute != "none" or trainer.offload
    width = BYTES[trainer.compute_dtype]
    if reshard:
        yield Term(name=f"{name} gathered", gib=width * (2 * shape.layer_parameters + shape.vocab * shape.hidden) / GIB, words=f"{width} B x (2 layers of {_b(shape.layer_parameters)} + embedding)")
    elif width != 4 or ranks > 1:
        yield Term(name=f"{name} gathered", gib=width * shape.parameters / GIB, words=f"{width} B x {size}")


def _frozen(learner: LearnerConfig) -> Iterator[tuple[str, bool]]:
    algorithm = learner.algorithm
    if algorithm.kl is not None and algorithm.kl.reference != "behaviour":
        yield "reference weights", algorithm.kl.offload
    if algorithm.teacher is not None:
        yield "teacher weights", algorithm.teacher.offload


def _activations(learner: LearnerConfig, shape: Shape) -> Iterator[Term]:
    trainer = learner.trainer
    tokens, width = trainer.row_tokens, BYTES[trainer.compute_dtype]
    whole = ACTIVATION_BYTES * width / 2 * tokens * shape.hidden / GIB  # of one layer
    kept = width * tokens * shape.hidden / GIB  # of one that is computed again
    again = {"none": 0, "selective": -(-shape.layers // trainer.recompute_every), "full": shape.layers}[trainer.recompute]
    full = shape.layers - again
    gib = full * whole + again * kept + (whole if again else 0.0)
    words = f"{full} layers x {ACTIVATION_BYTES * width // 2} B x {tokens} tokens x {shape.hidden}" if full else f"{shape.layers} layers x {width} B x {tokens} tokens x {shape.hidden} + one whole layer"
    yield Term(name="activations", gib=gib, words=words + (f" + {again} layers that keep their input" if full and again else ""))


def served(rollout: RolloutConfig, shape: Shape, gpu_gib: float) -> tuple[list[Term], float]:
    """(terms of one GPU of a replica, tokens that the KV cache of its engine has room for). The engine takes gpu_memory_fraction of the GPU: what weights leave is KV cache."""
    tensor, width = rollout.tensor_parallel, BYTES[rollout.dtype]
    parts = tensor * rollout.pipeline_parallel  # of an engine, a GPU each
    weights = width * shape.parameters / parts / GIB
    taken = rollout.gpu_memory_fraction * gpu_gib
    cache = taken - weights - OVERHEAD_GIB
    per_token = shape.kv_bytes_per_token(rollout.dtype) / parts
    tokens = max(0.0, cache) * GIB / per_token
    terms = [
        Term(name="weights", gib=weights, words=f"{width} B x {_b(shape.parameters)} / {parts}"),
        Term(name="KV cache", gib=cache, words=f"{rollout.gpu_memory_fraction:g} x {gpu_gib:g} - {weights:.1f} - {OVERHEAD_GIB:g}: {tokens:,.0f} tokens of {per_token / 1024:.0f} KiB"),
        Term(name="CUDA and activations", gib=OVERHEAD_GIB, words="by experience"),
        # A part of the layers stages all of them, and loads its own (docs/rollout.md).
        Term(name="staging of an update", gib=width * shape.parameters / tensor / GIB, words=f"{width} B x {_b(shape.parameters)} / {tensor}, beside the engine's share"),
    ]
    return terms, tokens


def _b(parameters: float) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M"
