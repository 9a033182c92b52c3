"""Who may look at whom in a packed row."""

from __future__ import annotations

import torch
from torch import Tensor

PROMPT = -1  # branch id of a prompt token, shared by all completions of its document


def attention_mask(document: Tensor, branch: Tensor) -> Tensor:
    """Boolean mask [1, 1, length, length], True where the query (row) may see the key (column).

    A key is visible when it stands no later in the row, belongs to the same document, and is part of the prompt or of the
    query's own branch. Positions inside a document are ordered along the row, so row order is causal order.

    Args: document, branch: int tensors [length]; PROMPT marks prompt tokens.
    Raises ValueError when the two differ in shape or are not one-dimensional.
    """
    if document.dim() != 1 or document.shape != branch.shape:
        raise ValueError(f"document {tuple(document.shape)} and branch {tuple(branch.shape)} must both be [length]")
    order = torch.arange(document.numel(), device=document.device)
    causal = order[None, :] <= order[:, None]
    same_document = document[None, :] == document[:, None]
    readable = (branch[None, :] == PROMPT) | (branch[None, :] == branch[:, None])
    return (causal & same_document & readable)[None, None]
