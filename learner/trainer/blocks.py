"""A packed row's mask as the blocks that flex attention skips, fills whole, or looks into.

The blocks come out of the ranges (mask.Reach) by arithmetic on [length, length / 128] numbers, so the square of the length never exists and nothing
is compiled to find them. Within a block that is seen in part, the kernel asks the ranges of the query alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from learner.trainer.mask import Reach

BLOCK = 128


def block_mask(ranges: Reach) -> BlockMask:
    """Of one row, for all heads. Raises ValueError unless its length is a multiple of BLOCK."""
    length = ranges.own_start.numel()
    if length % BLOCK:
        raise ValueError(f"a row of {length} tokens is no multiple of {BLOCK}; fill it up (mask.padded)")
    seen, whole = block_kinds(ranges)
    own_start, prefix_start, prefix_end = (values.to(torch.int32) for values in (ranges.own_start, ranges.prefix_start, ranges.prefix_end))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key <= query) & (key >= own_start[query])) | ((key >= prefix_start[query]) & (key < prefix_end[query]))

    return BlockMask.from_kv_blocks(*_ordered(seen & ~whole), *_ordered(whole), BLOCK_SIZE=BLOCK, mask_mod=visible)


def block_kinds(ranges: Reach) -> tuple[Tensor, Tensor]:
    """(seen, whole), each bool [length / BLOCK, length / BLOCK]: blocks of which some pair is visible, and those of which every pair is."""
    length = ranges.own_start.numel()
    query = torch.arange(length, device=ranges.own_start.device)[:, None]
    first = torch.arange(0, length, BLOCK, device=query.device)[None, :]
    last = first + BLOCK - 1
    own, start, end = (values[:, None] for values in (ranges.own_start, ranges.prefix_start, ranges.prefix_end))
    seen = ((own <= last) & (query >= first)) | ((start <= last) & (end > first) & (start < end))
    joined = (start <= first) & (own <= end) & (query >= last)  # the prefix runs on into the token's own segment
    whole = ((own <= first) & (query >= last)) | ((start <= first) & (end > last)) | joined
    shape = (length // BLOCK, BLOCK, length // BLOCK)
    return seen.view(shape).any(1), whole.view(shape).all(1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of marked columns of each row of blocks, [1, 1, rows], and all columns, the marked ones first, [1, 1, rows, columns]."""
    number = blocks.sum(1, dtype=torch.int32)
    columns = blocks.int().argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None], columns[None, None].contiguous()
