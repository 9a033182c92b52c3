"""A packed row cut into small dense attentions: who sees the same keys is computed together, so the square of the row never is.

A document without branches beside each other is one causal attention. One with several branches is either one attention under a dense mask
of the document, or one for its prompt and one for each branch over (prompt, branch): whichever has fewer pairs, calls counted in.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.trainer.mask import PROMPT, Reach

CALL_PAIRS = 4096  # pairs (query, key) whose computation takes as long as one more call


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Queries [start, end) over keys: those of `prefix` and then [start, end).

    Example: Piece(start=3, end=5, prefix=(0, 2), mask=tensor of bool [2, 4]); mask None: causal, without a prefix.
    """

    start: int
    end: int
    prefix: tuple[int, int]  # a range of the row; empty where start == end
    mask: Tensor | None  # bool [end - start, prefix length + end - start]


def pieces(document: Tensor, branch: Tensor, ranges: Reach, *, window: int | None) -> tuple[Piece, ...]:
    """In row order, every token a query of exactly one piece. Args: [length] each; ranges: their reach under `window`."""
    segments = _segments(document, branch)
    made: list[Piece] = []
    while segments:
        number = document[segments[0][0]]
        count = next((i for i, (start, _) in enumerate(segments) if document[start] != number), len(segments))
        made += _document(segments[:count], branch, ranges, window)
        segments = segments[count:]
    return tuple(made)


def _segments(document: Tensor, branch: Tensor) -> list[tuple[int, int]]:
    """Ranges of equal document and branch, in order."""
    changed = (document[1:] != document[:-1]) | (branch[1:] != branch[:-1])
    borders = [0, *(changed.nonzero()[:, 0] + 1).tolist(), document.numel()]
    return list(itertools.pairwise(borders))


def _document(segments: list[tuple[int, int]], branch: Tensor, ranges: Reach, window: int | None) -> list[Piece]:
    start, end = segments[0][0], segments[-1][1]
    prompt = segments[0] if int(branch[start]) == PROMPT else (start, start)
    branches = [segment for segment in segments if segment != prompt]
    if len(branches) <= 1:
        longest = window is None or end - start <= window
        return [Piece(start=start, end=end, prefix=(start, start), mask=None if longest else _mask(ranges, start, end, (start, start)))]
    parts = [segment for segment in (prompt, *branches) if segment[1] > segment[0]]
    apart = sum((b - a) * (b - a + (prompt[1] - prompt[0]) * ((a, b) != prompt)) for a, b in parts) + CALL_PAIRS * (len(parts) - 1)
    if (end - start) ** 2 <= apart:
        return [Piece(start=start, end=end, prefix=(start, start), mask=_mask(ranges, start, end, (start, start)))]
    none = (start, start)
    return [
        Piece(start=a, end=b, prefix=none, mask=None) if (a, b) == prompt and (window is None or b - a <= window) else Piece(start=a, end=b, prefix=none if (a, b) == prompt else prompt, mask=_mask(ranges, a, b, none if (a, b) == prompt else prompt))
        for a, b in parts
    ]  # fmt: skip


def _mask(ranges: Reach, start: int, end: int, prefix: tuple[int, int]) -> Tensor:
    """Bool [end - start, prefix length + end - start] of what these queries see."""
    query = torch.arange(start, end, device=ranges.own_start.device)
    key = torch.cat([torch.arange(*prefix, device=query.device), query])
    own, low, high = (values[start:end, None] for values in (ranges.own_start, ranges.prefix_start, ranges.prefix_end))
    return ((key >= own) & (key <= query[:, None])) | ((key >= low) & (key < high))


def dense_of(made: tuple[Piece, ...], length: int) -> Tensor:
    """Bool [length, length] that these pieces compute: for tests."""
    whole = torch.zeros(length, length, dtype=torch.bool)
    for piece in made:
        keys = torch.cat([torch.arange(*piece.prefix), torch.arange(piece.start, piece.end)])
        square = piece.end - piece.start
        mask = torch.ones(square, square, dtype=torch.bool).tril() if piece.mask is None else piece.mask
        whole[piece.start : piece.end, keys] = mask
    return whole

