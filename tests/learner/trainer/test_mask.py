"""Ranges, blocks and pieces of a packed row say what its definition says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learner.trainer import pieces as pieces_module
from learner.trainer.blocks import BLOCK, block_kinds, block_mask
from learner.trainer.mask import PROMPT, attention_mask, dense, padded, reach
from learner.trainer.packing import Row, WeightedSample, pack
from learner.trainer.pieces import dense_of, pieces
from tests.learner.trainer import rig


def rows(seed: int, row_tokens: int) -> list[Row]:
    return pack([WeightedSample(sample=s, advantage=1.0) for s in rig.samples(5, 3, seed=seed)], row_tokens=row_tokens, share_prefix=bool(seed % 3))


def defined(row: Row, window: int | None) -> Tensor:
    mask = attention_mask(row.document, row.branch)[0, 0]
    return mask if window is None else mask & (row.position[:, None] - row.position[None, :] < window)


def test_ranges_by_hand() -> None:
    # p p, branches a a and b: with a window of 2 the first a (position 2) sees p at 1 and itself, b the same though it stands at 4
    document, branch = torch.zeros(5, dtype=torch.int64), torch.tensor([PROMPT, PROMPT, 0, 0, 1])
    full = reach(document, branch)
    assert full.own_start.tolist() == [0, 0, 2, 2, 4] and full.prefix_end.tolist() == [0, 0, 2, 2, 2]
    assert dense(reach(document, branch, window=2)).int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 1]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(20, 90), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from([0, 4096]))
def test_ranges_and_pieces_are_the_mask_as_defined(seed: int, row_tokens: int, window: int | None, call_pairs: int) -> None:
    for row in rows(seed, row_tokens):
        ranges, expected = reach(row.document, row.branch, window=window), defined(row, window)
        assert torch.equal(dense(ranges), expected)
        before = pieces_module.CALL_PAIRS
        pieces_module.CALL_PAIRS = call_pairs
        try:
            made = pieces(row.document, row.branch, ranges, window=window)
        finally:
            pieces_module.CALL_PAIRS = before
        assert torch.equal(dense_of(made, row.ids.numel()), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.one_of(st.none(), st.integers(1, 200)))
def test_blocks_and_the_kernel_s_question_are_the_mask_as_defined(seed: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(seed)

    def part(low: int, high: int, branch: int) -> list[int]:
        return [branch] * int(torch.randint(low, high, (1,), generator=generator))

    number, document, branch = 0, [], []
    for each in range(2):
        segments = [part(1, 300, PROMPT), *(part(1, 300, number := number + 1) for _ in range(2))]
        branch += [token for segment in segments for token in segment]
        document += [each] * sum(map(len, segments))
    length = -(-len(document) // BLOCK) * BLOCK
    ranges = padded(reach(torch.tensor(document), torch.tensor(branch), window=window), length)
    whole = dense(ranges)
    assert torch.equal(whole[len(document) :].nonzero()[:, 0], whole[len(document) :].nonzero()[:, 1] - len(document))  # a filler sees itself
    tiles = whole.view(length // BLOCK, BLOCK, length // BLOCK, BLOCK).transpose(1, 2).flatten(2)
    seen, full = block_kinds(ranges)
    assert torch.equal(seen, tiles.any(2)) and torch.equal(full, tiles.all(2))
    mask = block_mask(ranges)
    order = torch.arange(length)
    asked = mask.mask_mod(torch.tensor(0), torch.tensor(0), order[:, None], order[None, :])
    assert torch.equal(asked, whole)
    assert torch.equal(mask.to_dense()[0, 0].bool(), seen)


def test_a_row_that_fills_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no multiple of 128"):
        block_mask(reach(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)))
    with pytest.raises(ValueError, match="window=0"):
        reach(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), window=0)
