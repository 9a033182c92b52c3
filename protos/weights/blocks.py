"""Which bytes of a slice go where in what a receiver keeps of a tensor: index arithmetic, no tensors.

A tensor is [num_rows, row_bytes]; a receiver keeps a Part of it (a tensor-parallel worker its rows, or its columns), densely. A slice
lies densely in its bucket and is one run of the tensor's bytes, or equal runs at equal distances.

    tensor [4, 8 bytes], Part rows 1..3, bytes 4..8; the slice is all of it:
    Block(source=12, source_stride=8, target=0, target_stride=4, num_rows=2, num_bytes=4)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What is kept of a tensor. Example: Part(first_row=0, num_rows=4, first_byte=0, num_bytes=8, row_bytes=8, total_rows=4) is all of it."""

    first_row: int
    num_rows: int
    first_byte: int  # inside each row
    num_bytes: int  # of each row
    row_bytes: int  # of the whole tensor
    total_rows: int

    @property
    def size(self) -> int:
        return self.num_rows * self.num_bytes

    @property
    def is_whole(self) -> bool:
        return self.size == self.total_rows * self.row_bytes


def whole_part(shape: Sequence[int], itemsize: int) -> Part:
    """All of a tensor; a scalar is one row."""
    rows, row_bytes = (shape[0] if shape else 1), math.prod(shape[1:]) * itemsize
    return Part(first_row=0, num_rows=rows, first_byte=0, num_bytes=row_bytes, row_bytes=row_bytes, total_rows=rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A rectangle of bytes to copy."""

    source: int  # first byte inside the dense slice
    source_stride: int  # from row to row
    target: int  # first byte inside what is kept
    target_stride: int
    num_rows: int
    num_bytes: int  # of each row


def blocks(part: Part, *, offset: int, num_bytes: int, num_runs: int, stride_bytes: int) -> list[Block]:
    """Copies that bring a slice's bytes into `part`; none where it has no byte of it."""
    length = num_bytes // max(1, num_runs)
    if num_runs <= 1:
        return list(_of_run(part, offset, num_bytes, 0))
    if part.is_whole:
        return [Block(source=0, source_stride=length, target=offset, target_stride=stride_bytes, num_rows=num_runs, num_bytes=length)]
    if stride_bytes == part.row_bytes and offset % part.row_bytes + length <= part.row_bytes:
        return list(_of_columns(part, offset, length, num_runs))
    return [block for run in range(num_runs) for block in _of_run(part, offset + run * stride_bytes, length, run * length)]


def _of_columns(part: Part, offset: int, length: int, num_runs: int) -> Iterator[Block]:
    """One run a row, the same columns in each."""
    row, column = divmod(offset, part.row_bytes)
    first, last = max(row, part.first_row), min(row + num_runs, part.first_row + part.num_rows)
    low, high = max(column, part.first_byte), min(column + length, part.first_byte + part.num_bytes)
    if first < last and low < high:
        yield Block(
            source=(first - row) * length + low - column, source_stride=length,
            target=(first - part.first_row) * part.num_bytes + low - part.first_byte, target_stride=part.num_bytes,
            num_rows=last - first, num_bytes=high - low,
        )  # fmt: skip


def _of_run(part: Part, start: int, num_bytes: int, dense: int) -> Iterator[Block]:
    """Contiguous bytes [start, start + num_bytes) of the tensor, which lie at `dense` in the slice."""
    end, width = start + num_bytes, part.row_bytes
    if part.num_bytes == width:  # whole rows: one run stays one run
        low, high = max(start, part.first_row * width), min(end, (part.first_row + part.num_rows) * width)
        if low < high:
            yield Block(source=dense + low - start, source_stride=0, target=low - part.first_row * width, target_stride=0, num_rows=1, num_bytes=high - low)
        return
    at = start
    while at < end:
        column = at % width
        whole_rows = (end - at) // width if column == 0 else 0
        length = min(width - column, end - at)
        for block in _of_columns(part, at, length, max(1, whole_rows)):
            yield replace(block, source=block.source + dense + at - start)
        at += whole_rows * width or length

