"""Who may look at whom in a packed row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROMPT = -1  # branch id of a prompt token, shared by all completions of its document


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What each token sees, as two ranges of the row: [own_start, itself] and [prefix_start, prefix_end).

    Example: prompt p p with branches a a and b: own_start [0, 0, 2, 2, 4], prefix_start [0, 0, 0, 0, 0], prefix_end [0, 0, 2, 2, 2].
    """

    own_start: Tensor  # int64 [length], within the token's own segment (a prompt or a branch)
    prefix_start: Tensor  # int64 [length], within the prompt of the token's document
    prefix_end: Tensor  # int64 [length]; not above prefix_start for a token that sees no prefix beside its own segment


def attention_mask(document: Tensor, branch: Tensor) -> Tensor:
    """Boolean mask [1, 1, length, length], True where the query (row) may see the key (column).

    A key is visible when it stands no later in the row, belongs to the same document, and is part of the prompt or of the
    query's own branch. Positions inside a document are ordered along the row, so row order is causal order.
    This is the definition, in space length²; the forward pass works with `reach`, which says the same in space length.

    Args: document, branch: int tensors [length]; PROMPT marks prompt tokens.
    Raises ValueError when the two differ in shape or are not one-dimensional.
    """
    _same_shape(document, branch)
    order = torch.arange(document.numel(), device=document.device)
    causal = order[None, :] <= order[:, None]
    same_document = document[None, :] == document[:, None]
    readable = (branch[None, :] == PROMPT) | (branch[None, :] == branch[:, None])
    return (causal & same_document & readable)[None, None]


def reach(document: Tensor, branch: Tensor, *, window: int | None = None) -> Reach:
    """The same as ranges. Segments (a document's prompt, each of its branches) must be contiguous, prompts first, as `pack` makes them.

    window: of a sliding-window layer, keys fewer than this many positions back are seen; positions continue from the prompt into each
    branch, so a branch's token counts from the prompt's end and not over the branches that lie between.
    Raises ValueError as attention_mask, and for a window below 1.
    """
    _same_shape(document, branch)
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a token sees itself")
    order = torch.arange(document.numel(), device=document.device)
    new_document = _changes(document)
    own_start = _latest(new_document | _changes(branch), order)
    document_start = _latest(new_document, order)
    ordinal = new_document.cumsum(0) - 1
    is_prompt = branch == PROMPT
    prompt_tokens = torch.zeros_like(order).index_add(0, ordinal, is_prompt.long())[ordinal]
    prefix_end = torch.where(is_prompt, document_start, document_start + prompt_tokens)
    prefix_start = document_start
    if window is not None:
        behind = torch.where(is_prompt, 0, prompt_tokens - (own_start - document_start))  # from place in the row to position in the document
        prefix_start = torch.maximum(document_start, order + behind - window + 1)
        own_start = torch.maximum(own_start, order - window + 1)
    return Reach(own_start=own_start, prefix_start=prefix_start, prefix_end=prefix_end)


def dense(ranges: Reach) -> Tensor:
    """Boolean mask [length, length] of a reach."""
    order = torch.arange(ranges.own_start.numel(), device=ranges.own_start.device)
    own = (order[None, :] >= ranges.own_start[:, None]) & (order[None, :] <= order[:, None])
    return own | ((order[None, :] >= ranges.prefix_start[:, None]) & (order[None, :] < ranges.prefix_end[:, None]))


def padded(ranges: Reach, length: int) -> Reach:
    """The reach of a row filled up to `length` tokens, each filler seeing itself alone."""
    held = ranges.own_start.numel()
    fill = torch.arange(held, length, device=ranges.own_start.device)
    none = torch.zeros_like(fill)
    return Reach(own_start=torch.cat([ranges.own_start, fill]), prefix_start=torch.cat([ranges.prefix_start, none]), prefix_end=torch.cat([ranges.prefix_end, none]))


def _changes(values: Tensor) -> Tensor:
    """Bool [length]: True at the first token and wherever the value differs from the one before."""
    return torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])


def _latest(marks: Tensor, order: Tensor) -> Tensor:
    """Of each token the place of the last mark up to it."""
    return torch.where(marks, order, 0).cummax(0).values


def _same_shape(document: Tensor, branch: Tensor) -> None:
    if document.dim() != 1 or document.shape != branch.shape:
        raise ValueError(f"document {tuple(document.shape)} and branch {tuple(branch.shape)} must both be [length]")
