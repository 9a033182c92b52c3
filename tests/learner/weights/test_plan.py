"""The plan's properties, and one plan worked by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weights.placement import Box, Split, held, num_elements, whole
from learner.weights.plan import (
    Bucket,
    Region,
    Slice,
    TensorSpec,
    make_plan,
    region_of,
    sub_regions,
    whole_on_all,
)
from learner.weights.roots import assign_roots

Held = list[list[Box | None]]


def rows(spec: TensorSpec, ranges: list[tuple[int, int]]) -> list[Box | None]:
    """Boxes of whole rows."""
    return [((first, count), *whole(spec.shape[1:])) for first, count in ranges]


def bytes_of(region: Region) -> list[int]:
    return [region.offset + run * region.stride_bytes + at for run in range(region.num_runs) for at in range(region.run_bytes)]


def test_the_example_of_the_page_is_cut_as_it_says() -> None:
    spec = TensorSpec(name="a", shape=(4, 2), itemsize=4)  # 32 bytes, 8 a row
    plan = make_plan([spec], [rows(spec, [(0, 2), (2, 2)])], bucket_bytes=12)
    assert plan.buckets == (
        Bucket(owner=0, num_bytes=12, file_offset=0, root=0),
        Bucket(owner=1, num_bytes=12, file_offset=0, root=1),
        Bucket(owner=0, num_bytes=4, file_offset=12, root=0),
        Bucket(owner=1, num_bytes=4, file_offset=12, root=1),
    )
    assert [(s.region.offset, s.num_bytes, s.owner, s.bucket, s.bucket_offset) for s in plan.slices] == [
        (0, 12, 0, 0, 0),
        (16, 12, 1, 1, 0),
        (12, 4, 0, 2, 0),
        (28, 4, 1, 3, 0),
    ]
    assert isinstance(plan.slices[0], Slice)


def test_rows_with_a_hole_or_an_overlap_are_refused_by_name() -> None:
    spec = TensorSpec(name="w", shape=(4,), itemsize=4)
    with pytest.raises(ValueError, match="tensor w: the ranks hold 3 of its 4 elements"):
        make_plan([spec], [rows(spec, [(0, 2), (3, 1)])], bucket_bytes=64)
    with pytest.raises(ValueError, match=r"tensor w: boxes \(\(0, 3\),\) and \(\(2, 2\),\) overlap"):
        make_plan([spec], [rows(spec, [(0, 3), (2, 2)])], bucket_bytes=64)


def test_replicated_tensors_go_to_the_owner_with_least() -> None:
    # 40, 24 and 16 bytes on two owners: 40 | 24 + 16.
    tensors = [TensorSpec(name=str(size), shape=(size,), itemsize=1) for size in (16, 40, 24)]
    plan = make_plan(tensors, [whole_on_all(tensor, 2) for tensor in tensors], bucket_bytes=1024)
    assert [plan.file_bytes(owner) for owner in range(2)] == [40, 40]
    assert {run.tensor: run.owner for run in plan.runs} == {0: 1, 1: 0, 2: 1}


def test_a_large_part_that_several_ranks_hold_is_shared_out_by_rows() -> None:
    # HSDP, 2 replicas of 2 shards of [6, 2] bytes: ranks 0 and 2 hold rows 0..3, 1 and 3 rows 3..6. Each pair shares 3 rows as 1 + 2.
    tensor = TensorSpec(name="w", shape=(6, 2), itemsize=1)
    boxes = [held(tensor.shape, (2, 2), (rank // 2, rank % 2), [None, Split(dim=0)]) for rank in range(4)]
    plan = make_plan([tensor], [boxes], bucket_bytes=64, split_bytes=4)
    assert [(run.owner, run.box[0]) for run in plan.runs] == [(0, (0, 1)), (1, (3, 1)), (2, (1, 2)), (3, (4, 2))]


def test_columns_are_equal_runs_at_equal_distances_and_are_cut_where_a_bucket_ends() -> None:
    # Columns 2..4 of [4, 4] elements of 2 bytes: 4 runs of 4 bytes, 8 bytes apart, from byte 4 on.
    region = region_of((4, 4), 2, ((0, 4), (2, 2)))
    assert region == Region(offset=4, run_bytes=4, num_runs=4, stride_bytes=8)
    # Dense bytes 2..11: the second half of run 0, run 1 whole, three bytes of run 2.
    assert [(r.offset, r.run_bytes, r.num_runs) for r in sub_regions(region, 2, 11)] == [(6, 2, 1), (12, 4, 1), (20, 3, 1)]


def test_a_box_cut_in_three_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="cut in three dimensions"):
        region_of((4, 4, 4), 2, ((0, 2), (0, 2), (0, 2)))


def test_few_ranks_talk_to_the_replicas_each_for_its_own_node_and_evenly() -> None:
    # 12 ranks on two nodes, 4 roots: two a node; each sends for three ranks.
    roots = assign_roots([10] * 12, [0] * 6 + [1] * 6, 4)
    assert roots == [0, 1, 0, 1, 0, 1, 6, 7, 6, 7, 6, 7]
    assert len(set(assign_roots([10] * 64, [rank // 8 for rank in range(64)], 8))) == 8
    assert assign_roots([5, 5], [0, 1], 8) == [0, 1]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], Held, int, int]:
    """Tensors over a random mesh of one to three dimensions, cut along one or two of their own or replicated or on one stage only;
    even, uneven and empty shards, scalars and empty tensors; buckets smaller and larger than slices."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    coordinates = list(itertools.product(*map(range, mesh)))
    tensors: list[TensorSpec] = []
    boxes: Held = []
    for index in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        spec = TensorSpec(name=f"t{index}", shape=shape, itemsize=draw(st.sampled_from([1, 2, 4])))
        cut: list[Split | None] = [None] * len(mesh)
        if shape:
            dims = draw(st.lists(st.sampled_from(sorted({0, 1} & set(range(len(shape))))), max_size=len(mesh)))
            for axis, dim in zip(draw(st.permutations(range(len(mesh)))), dims, strict=False):
                cut[axis] = Split(dim=dim)
        stage = draw(st.one_of(st.none(), st.integers(0, mesh[0] - 1)))
        own = [held(shape, mesh, at, cut) for at in coordinates]
        if stage is not None and cut[0] is None:  # a pipeline stage: the other ranks have nothing of it
            boxes.append([box if at[0] == stage else None for at, box in zip(coordinates, own, strict=True)])
        else:
            boxes.append(list(own))
        tensors.append(spec)
    return tensors, boxes, draw(st.integers(1, 200)), draw(st.integers(1, 100))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_every_byte_of_every_tensor_file_and_bucket_is_covered_once_within_the_bound(layout: tuple[list[TensorSpec], Held, int, int]) -> None:
    tensors, boxes, bucket_bytes, split_bytes = layout
    plan = make_plan(tensors, boxes, bucket_bytes=bucket_bytes, split_bytes=split_bytes)
    seen: dict[tuple[str, int], list[int]] = defaultdict(list)
    for piece in plan.slices:
        bucket = plan.buckets[piece.bucket]
        assert bucket.owner == piece.owner and piece.num_bytes >= 1
        seen["tensor", piece.tensor] += bytes_of(piece.region)
        seen["bucket", piece.bucket] += range(piece.bucket_offset, piece.bucket_offset + piece.num_bytes)
        at = bucket.file_offset + piece.bucket_offset
        seen["file", piece.owner] += range(at, at + piece.num_bytes)
    for t, tensor in enumerate(tensors):
        assert sorted(seen["tensor", t]) == list(range(tensor.num_bytes))
    for b, bucket in enumerate(plan.buckets):
        assert sorted(seen["bucket", b]) == list(range(bucket.num_bytes)) and 1 <= bucket.num_bytes <= bucket_bytes
    for owner in range(plan.num_owners):
        assert sorted(seen["file", owner]) == list(range(plan.file_bytes(owner)))
    assert plan.total_bytes == sum(plan.file_bytes(owner) for owner in range(plan.num_owners))


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_an_owner_sends_only_what_it_holds_aligned_to_its_elements(layout: tuple[list[TensorSpec], Held, int, int]) -> None:
    tensors, boxes, bucket_bytes, split_bytes = layout
    plan = make_plan(tensors, boxes, bucket_bytes=bucket_bytes, split_bytes=split_bytes)
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in plan.slices:
        sent[piece.owner, piece.tensor] += bytes_of(piece.region)
    for (owner, t), positions in sent.items():
        box = boxes[t][owner]
        assert box is not None and num_elements(box)
        assert set(positions) <= set(bytes_of(region_of(tensors[t].shape, tensors[t].itemsize, box)))
    assert all(run.file_offset % tensors[run.tensor].itemsize == 0 for run in plan.runs)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16)), min_size=1, max_size=8), st.integers(1, 6), st.integers(8, 256))
@settings(max_examples=200, deadline=None)
def test_roots_of_evenly_sharded_tensors_differ_by_one_row_of_each_at_most(shapes: list[tuple[int, int]], num_owners: int, bucket_bytes: int) -> None:
    tensors = [TensorSpec(name=f"t{i}", shape=shape, itemsize=2) for i, shape in enumerate(shapes)]
    even = [rows(spec, [(k * n // num_owners, (k + 1) * n // num_owners - k * n // num_owners) for k in range(num_owners)]) for spec, (n, _) in zip(tensors, shapes, strict=True)]
    plan = make_plan(tensors, even, bucket_bytes=bucket_bytes)
    loads = [plan.file_bytes(owner) for owner in range(num_owners)]
    assert max(loads) - min(loads) <= sum(tensor.num_bytes // tensor.shape[0] for tensor in tensors)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=10), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_roots_of_replicated_tensors_differ_by_the_largest_at_most(sizes: list[int], num_owners: int) -> None:
    tensors = [TensorSpec(name=f"t{i}", shape=(n,), itemsize=4) for i, n in enumerate(sizes)]
    plan = make_plan(tensors, [whole_on_all(tensor, num_owners) for tensor in tensors], bucket_bytes=64)
    loads = [plan.file_bytes(owner) for owner in range(num_owners)]
    assert max(loads) - min(loads) <= 4 * max(sizes)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_owners_take_turns_in_the_sending_order(layout: tuple[list[TensorSpec], Held, int, int]) -> None:
    tensors, boxes, bucket_bytes, split_bytes = layout
    plan = make_plan(tensors, boxes, bucket_bytes=bucket_bytes, split_bytes=split_bytes, max_roots=64)
    turns = [(bucket.file_offset // bucket_bytes, bucket.owner) for bucket in plan.buckets]
    assert turns == sorted(turns)
