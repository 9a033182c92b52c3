"""The plan's properties, and one plan worked by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weights.plan import Bucket, Rows, Slice, TensorSpec, TransferPlan, make_plan


def test_the_example_of_the_page_is_cut_as_it_says() -> None:
    spec = TensorSpec(name="a", shape=(4, 2), itemsize=4)  # 32 bytes, 8 a row
    plan = make_plan([spec], [[(0, 2), (2, 2)]], num_owners=2, bucket_bytes=12)
    assert plan.buckets == (
        Bucket(owner=0, num_bytes=12, file_offset=0),
        Bucket(owner=1, num_bytes=12, file_offset=0),
        Bucket(owner=0, num_bytes=4, file_offset=12),
        Bucket(owner=1, num_bytes=4, file_offset=12),
    )
    assert [(s.tensor_offset, s.num_bytes, s.owner, s.bucket, s.bucket_offset) for s in plan.slices] == [
        (0, 12, 0, 0, 0),
        (16, 12, 1, 1, 0),
        (12, 4, 0, 2, 0),
        (28, 4, 1, 3, 0),
    ]
    assert isinstance(plan.slices[0], Slice)


def test_rows_with_a_hole_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor w: owner 1 starts at row 3, but the rows before it end at 2"):
        make_plan([TensorSpec(name="w", shape=(4,), itemsize=4)], [[(0, 2), (3, 1)]], num_owners=2, bucket_bytes=64)
    with pytest.raises(ValueError, match="tensor w: owners hold 3 rows, but it has 4"):
        make_plan([TensorSpec(name="w", shape=(4,), itemsize=4)], [[(0, 2), (2, 1)]], num_owners=2, bucket_bytes=64)


def test_replicated_tensors_go_to_the_owner_with_least() -> None:
    # 40, 24 and 16 bytes on two owners: 40 | 24 + 16.
    tensors = [TensorSpec(name=str(size), shape=(size,), itemsize=1) for size in (16, 40, 24)]
    plan = make_plan(tensors, [None] * 3, num_owners=2, bucket_bytes=1024)
    assert [plan.file_bytes(owner) for owner in range(2)] == [40, 40]
    assert {run.tensor: run.owner for run in plan.runs} == {0: 1, 1: 0, 2: 1}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Rows], int, int]:
    """Tensors with even, uneven and empty shards, replicas, scalars and empty tensors; buckets smaller and larger than slices."""
    num_owners = draw(st.integers(1, 5))
    tensors: list[TensorSpec] = []
    rows: list[Rows] = []
    for index in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        spec = TensorSpec(name=f"t{index}", shape=shape, itemsize=draw(st.sampled_from([1, 2, 4])))
        tensors.append(spec)
        if draw(st.booleans()):
            rows.append(None)
            continue
        cuts = sorted(draw(st.lists(st.integers(0, spec.num_rows), min_size=num_owners - 1, max_size=num_owners - 1)))
        ends = [0, *cuts, spec.num_rows]
        rows.append([(ends[i], ends[i + 1] - ends[i]) for i in range(num_owners)])
    return tensors, rows, num_owners, draw(st.integers(1, 200))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_every_byte_of_every_tensor_file_and_bucket_is_covered_once_within_the_bound(layout: tuple[list[TensorSpec], list[Rows], int, int]) -> None:
    tensors, rows, num_owners, bucket_bytes = layout
    plan = make_plan(tensors, rows, num_owners=num_owners, bucket_bytes=bucket_bytes)
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    for piece in plan.slices:
        bucket = plan.buckets[piece.bucket]
        assert bucket.owner == piece.owner and piece.num_bytes >= 1
        seen["tensor", piece.tensor] += range(piece.tensor_offset, piece.tensor_offset + piece.num_bytes)
        seen["bucket", piece.bucket] += range(piece.bucket_offset, piece.bucket_offset + piece.num_bytes)
        at = bucket.file_offset + piece.bucket_offset
        seen["file", piece.owner] += range(at, at + piece.num_bytes)
    for t, tensor in enumerate(tensors):
        assert sorted(seen["tensor", t]) == list(range(tensor.num_bytes))
    for b, bucket in enumerate(plan.buckets):
        assert sorted(seen["bucket", b]) == list(range(bucket.num_bytes)) and 1 <= bucket.num_bytes <= bucket_bytes
    for owner in range(num_owners):
        assert sorted(seen["file", owner]) == list(range(plan.file_bytes(owner)))
    assert plan.total_bytes == sum(plan.file_bytes(owner) for owner in range(num_owners))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_an_owner_sends_only_rows_it_holds_and_runs_match_its_slices(layout: tuple[list[TensorSpec], list[Rows], int, int]) -> None:
    tensors, rows, num_owners, bucket_bytes = layout
    plan = make_plan(tensors, rows, num_owners=num_owners, bucket_bytes=bucket_bytes)
    for piece in plan.slices:
        ranges = rows[piece.tensor]
        if ranges is not None:
            first, count = ranges[piece.owner]
            row_bytes = tensors[piece.tensor].row_bytes
            assert first * row_bytes <= piece.tensor_offset
            assert piece.tensor_offset + piece.num_bytes <= (first + count) * row_bytes
    assert _bytes_by_run(plan) == {(run.owner, run.tensor): run.num_bytes for run in plan.runs}


def _bytes_by_run(plan: TransferPlan) -> dict[tuple[int, int], int]:
    totals: dict[tuple[int, int], int] = defaultdict(int)
    for piece in plan.slices:
        totals[piece.owner, piece.tensor] += piece.num_bytes
    return dict(totals)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16)), min_size=1, max_size=8), st.integers(1, 6), st.integers(8, 256))
@settings(max_examples=200, deadline=None)
def test_roots_of_evenly_sharded_tensors_differ_by_one_row_of_each_at_most(shapes: list[tuple[int, int]], num_owners: int, bucket_bytes: int) -> None:
    tensors = [TensorSpec(name=f"t{i}", shape=shape, itemsize=2) for i, shape in enumerate(shapes)]
    rows = [[(k * n // num_owners, (k + 1) * n // num_owners - k * n // num_owners) for k in range(num_owners)] for n, _ in shapes]
    plan = make_plan(tensors, rows, num_owners=num_owners, bucket_bytes=bucket_bytes)
    loads = [plan.file_bytes(owner) for owner in range(num_owners)]
    assert max(loads) - min(loads) <= sum(tensor.row_bytes for tensor in tensors)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_roots_of_replicated_tensors_differ_by_the_largest_at_most(sizes: list[int], num_owners: int) -> None:
    tensors = [TensorSpec(name=f"t{i}", shape=(n,), itemsize=4) for i, n in enumerate(sizes)]
    plan = make_plan(tensors, [None] * len(sizes), num_owners=num_owners, bucket_bytes=64)
    loads = [plan.file_bytes(owner) for owner in range(num_owners)]
    assert max(loads) - min(loads) <= 4 * max(sizes)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_owners_take_turns_in_the_sending_order(layout: tuple[list[TensorSpec], list[Rows], int, int]) -> None:
    tensors, rows, num_owners, bucket_bytes = layout
    plan = make_plan(tensors, rows, num_owners=num_owners, bucket_bytes=bucket_bytes)
    turns = [(bucket.file_offset // bucket_bytes, bucket.owner) for bucket in plan.buckets]
    assert turns == sorted(turns)
