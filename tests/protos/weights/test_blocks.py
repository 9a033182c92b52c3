"""Copies against byte-by-byte bookkeeping, over random slices and parts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.weights.blocks import Block, Part, blocks


def test_the_example_of_the_page() -> None:
    part = Part(first_row=1, num_rows=2, first_byte=4, num_bytes=4, row_bytes=8, total_rows=4)
    assert blocks(part, offset=0, num_bytes=32, num_runs=1, stride_bytes=0) == [Block(source=12, source_stride=8, target=0, target_stride=4, num_rows=2, num_bytes=4)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Part, int, int, int, int]:
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    first_row, first_byte = draw(st.integers(0, rows - 1)), draw(st.integers(0, width - 1))
    part = Part(
        first_row=first_row, num_rows=draw(st.integers(0, rows - first_row)), first_byte=first_byte, num_bytes=draw(st.integers(1, width - first_byte)),
        row_bytes=width, total_rows=rows,
    )  # fmt: skip
    if draw(st.booleans()):
        part = Part(first_row=0, num_rows=rows, first_byte=0, num_bytes=width, row_bytes=width, total_rows=rows)
    total = rows * width
    offset = draw(st.integers(0, total - 1))
    runs = draw(st.integers(1, 4))
    stride = draw(st.one_of(st.just(width), st.integers(1, 9)))
    length = draw(st.integers(1, 9)) if runs == 1 else draw(st.integers(1, stride))
    runs = max(1, min(runs, (total - offset - length) // stride + 1)) if length <= total - offset else 1
    length = min(length, total - offset)
    return part, offset, length * runs, runs, stride if runs > 1 else 0


@given(cases())
@settings(max_examples=600, deadline=None)
def test_every_kept_byte_of_a_slice_is_copied_once_to_its_place_and_no_other(case: tuple[Part, int, int, int, int]) -> None:
    part, offset, num_bytes, runs, stride = case
    length = num_bytes // runs
    expected = {}
    for dense in range(num_bytes):
        row, column = divmod(offset + dense // length * stride + dense % length, part.row_bytes)
        row, column = row - part.first_row, column - part.first_byte
        if 0 <= row < part.num_rows and 0 <= column < part.num_bytes:
            expected[row * part.num_bytes + column] = dense
    copied: list[tuple[int, int]] = []
    for block in blocks(part, offset=offset, num_bytes=num_bytes, num_runs=runs, stride_bytes=stride):
        assert block.num_rows >= 1 and block.num_bytes >= 1
        copied += [(block.target + r * block.target_stride + i, block.source + r * block.source_stride + i) for r in range(block.num_rows) for i in range(block.num_bytes)]
    assert sorted(copied) == sorted(expected.items())
