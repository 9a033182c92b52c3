"""Attention over packed rows, under the name that transformers' models call it by.

    row ─▶ layout_of ─▶ one keyword of the model's forward pass ─▶ every layer ─▶ packed_attention
                        flex: a block mask for each window          flex attention, compiled (CUDA)
                        pieces: small dense attentions              scaled_dot_product_attention (CPU, odd head widths)

The model is told no mask of its own: an implementation without a registered mask function gets None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from learner.trainer.blocks import block_mask
from learner.trainer.mask import padded, reach
from learner.trainer.packing import Row
from learner.trainer.pieces import Piece, pieces

NAME = "headrace"
KEYWORD = "packed"  # of the layout in a model's forward pass
FULL = 0  # key of the layout of layers without a window
Kind = Literal["flex", "pieces"]
Layout = Mapping[int, "BlockMask | tuple[Piece, ...]"]  # by window; FULL: none

_UNKNOWN = ("s_aux", "position_bias", "head_mask")  # of models whose scores are more than query times key
_compiled_flex: Any = None


def layout_of(row: Row, windows: Sequence[int], *, kind: Kind, length: int) -> Layout:
    """What every layer needs of a row that is filled up to `length` tokens (with `pieces`: its own length). Args: windows of the model's layers."""
    made: dict[int, BlockMask | tuple[Piece, ...]] = {}
    for window in (FULL, *windows):
        ranges = reach(row.document, row.branch, window=window or None)
        made[window] = block_mask(padded(ranges, length)) if kind == "flex" else pieces(row.document, row.branch, ranges, window=window or None)
    return made


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, packed: Layout | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """[1, length, heads, width] from query [1, heads, length, width], key and value [1, key heads, length, width].

    Raises ValueError for a model that does not hand the layout down, or whose scores are made in a way not known here.
    """
    odd = [name for name in _UNKNOWN if more.get(name) is not None]
    if packed is None or odd or dropout:
        reason = f"has attention with {', '.join(odd)}" if odd else f"has dropout {dropout} in its attention" if dropout else "does not pass keywords of its forward pass on to its attention"
        raise ValueError(f"{type(module).__name__} {reason}: packed rows would be computed wrongly, so this model cannot be trained here")
    layout = packed[sliding_window or FULL]
    if isinstance(layout, BlockMask):
        return _flex(query, key, value, layout, scaling, softcap).transpose(1, 2), None
    return _by_pieces(query, key, value, layout, scaling, softcap).transpose(1, 2), None


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None, softcap: float | None) -> Tensor:
    """[1, heads, length, width]. Compiled by itself unless the layer around it is: uncompiled it would make the whole matrix."""

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator]

    grouped = query.shape[1] != key.shape[1]
    function = flex_attention if torch.compiler.is_compiling() else _compiled()
    answer = function(query, key, value, score_mod=None if softcap is None else capped, block_mask=mask, scale=scaling, enable_gqa=grouped)
    assert isinstance(answer, Tensor)
    return answer


def _compiled() -> Any:
    global _compiled_flex
    if _compiled_flex is None:
        _compiled_flex = torch.compile(flex_attention, dynamic=False)
    return _compiled_flex


def _by_pieces(query: Tensor, key: Tensor, value: Tensor, layout: Sequence[Piece], scaling: float | None, softcap: float | None) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    parts = []
    for piece in layout:
        own = slice(piece.start, piece.end)
        if piece.prefix[0] == piece.prefix[1]:
            keys, values = key[:, :, own], value[:, :, own]
        else:
            keys, values = (torch.cat([whole[:, :, slice(*piece.prefix)], whole[:, :, own]], dim=2) for whole in (key, value))
        parts.append(_dense(query[:, :, own], keys, values, piece.mask, scaling, softcap))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1, scale=scaling)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype), value)


AttentionInterface.register(NAME, packed_attention)
