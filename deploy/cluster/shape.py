"""Sizes of a model, for estimates: from a folder's config.json, or as the run file says for a hub id."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder. Example: Qwen2.5-0.5B is `Shape(parameters=494e6, layers=24, hidden=896, heads=14, kv_heads=2, head_width=64, vocab=151936)`."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int

    @property
    def layer_parameters(self) -> float:
        """Of one layer: what is neither embedding nor head, in equal parts."""
        return max(0.0, self.parameters - self.vocab * self.hidden) / self.layers

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * BYTES[dtype]


def shape_of(model: str, sizes: dict[str, float] | None) -> Shape | None:
    """sizes: fields of Shape that the file says (billions of parameters as `parameters_b`). None: a hub id of which the file says nothing, or a config.json that does not say."""
    found = _of_folder(Path(model).expanduser())
    if sizes:
        found |= {name: value for name, value in sizes.items() if value is not None and name != "parameters_b"}
        if sizes.get("parameters_b"):
            found["parameters"] = sizes["parameters_b"] * 1e9
    if not {"layers", "hidden", "heads", "vocab"} <= found.keys():
        return None
    found.setdefault("kv_heads", found["heads"])
    found.setdefault("head_width", found["hidden"] // found["heads"])
    found.setdefault("parameters", counted(found))
    found.pop("intermediate", None)
    found.pop("tied", None)
    sizes_found: dict[str, Any] = {name: value if name == "parameters" else int(value) for name, value in found.items()}
    return Shape(**sizes_found)


def counted(sizes: dict[str, Any]) -> float:
    """Weights of a Llama-like decoder: attention, gated feed-forward, two norms a layer; embedding, head where it is not tied, last norm."""
    hidden, heads, kv_heads, width = (int(sizes[name]) for name in ("hidden", "heads", "kv_heads", "head_width"))
    inner = int(sizes.get("intermediate") or 4 * hidden)
    layer = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 3 * hidden * inner + 2 * hidden
    return float(int(sizes["layers"]) * layer + int(sizes["vocab"]) * hidden * (1 if sizes.get("tied") else 2) + hidden)


def _of_folder(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
        config = {**config, **config.get("text_config", {})}
        names = {
            "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
            "head_width": "head_dim", "vocab": "vocab_size", "intermediate": "intermediate_size", "tied": "tie_word_embeddings",
        }  # fmt: skip
        return {ours: config[theirs] for ours, theirs in names.items() if config.get(theirs) is not None}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # another check says what is wrong with it
