"""Where a tensor of a Hugging Face checkpoint lies in the parameters of an engine's worker: a pure function of names and shapes.

Engines fuse q, k and v into one parameter and gate and up into another, cut both by rows over tensor-parallel workers, cut the output
projections by columns, and give every worker an equal share of a padded vocabulary. (The scheme is that of Megatron-LM, Shoeybi et al.
2019, section 3; names as in vLLM.)

    2 heads of 4, one kv head, two workers, hidden 8; worker 1:   q_proj.weight [8, 8] rows 4..8 -> qkv_proj.weight rows 0..4
                                                                  k_proj.weight [4, 8] rows 0..4 -> qkv_proj.weight rows 4..8
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protos.weights.blocks import Part, whole_part

VOCABULARY_PADDING = 64  # rows; vLLM's DEFAULT_VOCAB_PADDING_SIZE
_VOCABULARY = ("embed_tokens", "lm_head")
_COLUMNS = ("o_proj", "down_proj")  # cut along their input


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What decides the layout. Example: Engine(num_heads=2, num_kv_heads=1, head_dim=4, intermediate=16, vocabulary=259, num_workers=2, worker=1)"""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int  # rows of gate_proj and of up_proj
    vocabulary: int  # rows of the embedding, without padding
    num_workers: int = 1
    worker: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Rows and columns (in elements) of a checkpoint's tensor, and the first row of the engine's parameter that holds them.

    Example: Place(parameter="model.layers.0.self_attn.qkv_proj.weight", row=4, first=0, count=4, first_column=0, columns=8)
    """

    parameter: str
    row: int
    first: int
    count: int  # 0: the worker keeps nothing of it
    first_column: int
    columns: int  # of one row; 1 for vectors

    def part(self, shape: Sequence[int], itemsize: int) -> Part:
        """The same in bytes."""
        whole = whole_part(shape, itemsize)
        return Part(
            first_row=self.first, num_rows=self.count, first_byte=self.first_column * itemsize, num_bytes=self.columns * itemsize,
            row_bytes=whole.row_bytes, total_rows=whole.total_rows,
        )  # fmt: skip


def engine_of(config: Mapping[str, Any], *, num_workers: int = 1, worker: int = 0) -> Engine | None:
    """From a model's config.json; None where it does not say enough, or does not divide among the workers."""
    sizes = [config.get(key) for key in ("num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")]
    if not all(isinstance(value, int) and value > 0 for value in sizes):
        return None
    heads, hidden, intermediate, vocabulary = (int(value or 0) for value in sizes)
    kv_heads = config.get("num_key_value_heads") or heads
    divides = heads % num_workers == 0 and intermediate % num_workers == 0 and (kv_heads % num_workers == 0 or num_workers % kv_heads == 0)
    if not divides:
        return None
    return Engine(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=config.get("head_dim") or hidden // heads, intermediate=intermediate, vocabulary=vocabulary,
        num_workers=num_workers, worker=worker,
    )  # fmt: skip


def place_of(name: str, shape: Sequence[int], engine: Engine) -> Place | None:
    """Where a tensor goes; None for one that this scheme does not know (experts, or a shape that is not what the configuration says)."""
    prefix, _, leaf = name.rpartition(".")
    parent, _, module = prefix.rpartition(".")
    rows, columns = (shape[0] if shape else 1), (shape[1] if len(shape) == 2 else 1)
    if len(shape) > 2 or leaf not in ("weight", "bias") or ".experts." in name:
        return None

    def put(parameter: str, row: int, first: int, count: int) -> Place:
        return Place(parameter=parameter, row=row, first=first, count=count, first_column=0, columns=columns)

    if module in ("q_proj", "k_proj", "v_proj"):
        return _attention(module, f"{parent}.qkv_proj.{leaf}", rows, engine, put)
    if module in ("gate_proj", "up_proj"):
        share = engine.intermediate // engine.num_workers
        row = 0 if module == "gate_proj" else share
        return put(f"{parent}.gate_up_proj.{leaf}", row, engine.worker * share, share) if rows == engine.intermediate else None
    if module in _VOCABULARY:
        padded = -(-engine.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
        share = padded // engine.num_workers
        first = min(engine.worker * share, engine.vocabulary)
        return put(name, 0, first, min(share, engine.vocabulary - first)) if rows == engine.vocabulary else None
    if module in _COLUMNS and len(shape) == 2 and engine.num_workers > 1:
        if columns % engine.num_workers:
            return None
        share = columns // engine.num_workers
        return Place(parameter=name, row=0, first=0, count=rows, first_column=engine.worker * share, columns=share)
    if len(shape) == 2 and engine.num_workers > 1:
        return None  # a matrix of unknown cut
    return put(name, 0, 0, rows)


def _attention(module: str, parameter: str, rows: int, engine: Engine, put: Any) -> Place | None:
    heads = engine.num_heads if module == "q_proj" else engine.num_kv_heads
    if rows != heads * engine.head_dim:
        return None
    q_rows = engine.num_heads // engine.num_workers * engine.head_dim
    kv_heads = max(1, engine.num_kv_heads // engine.num_workers)  # fewer heads than workers: each is kept by several
    kv_rows = kv_heads * engine.head_dim
    if module == "q_proj":
        return put(parameter, 0, engine.worker * q_rows, q_rows)  # type: ignore[no-any-return]
    first_head = engine.worker * engine.num_kv_heads // engine.num_workers if engine.num_kv_heads < engine.num_workers else engine.worker * kv_heads
    row = q_rows if module == "k_proj" else q_rows + kv_rows
    return put(parameter, row, first_head * engine.head_dim, kv_rows)  # type: ignore[no-any-return]
