"""Who sends which bytes of a policy version, in which order: a pure function of shapes and row ranges.

Rank r's file is the concatenation of its runs (its rows of each tensor, in the order of the tensors), cut every
`bucket_bytes`; a slice is the part of a run inside one bucket. Buckets are sent round by round, one of each owner, so
that every owner's link is in use from the start.

    tensor a [4, 2] of 4-byte elements on two ranks, two rows each; bucket_bytes=12:
    rank 0: a[0:16) -> bucket 0 = a[0:12), bucket 2 = a[12:16)      rank 1: a[16:32) -> bucket 1 = a[16:28), bucket 3 = a[28:32)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Example: TensorSpec(name="model.norm.weight", shape=(64,), itemsize=2)"""

    name: str
    shape: tuple[int, ...]  # of the whole tensor; () is one row of one element
    itemsize: int  # bytes of one element as served

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One owner's contiguous part of one tensor. Example: Run(tensor=0, owner=1, tensor_offset=16, num_bytes=16, file_offset=0)"""

    tensor: int
    owner: int
    tensor_offset: int  # first byte inside the tensor
    num_bytes: int  # at least 1
    file_offset: int  # first byte in the owner's file


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The part of a run inside one bucket. Fields as in the manifest.

    Example: Slice(tensor=0, tensor_offset=28, num_bytes=4, owner=1, bucket=3, bucket_offset=0)
    """

    tensor: int
    tensor_offset: int
    num_bytes: int
    owner: int
    bucket: int
    bucket_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What one owner sends at once. Example: Bucket(owner=1, num_bytes=4, file_offset=12)"""

    owner: int
    num_bytes: int
    file_offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """The whole plan, equal on all ranks. Slices are in sending order: by bucket, then by offset inside it."""

    tensors: tuple[TensorSpec, ...]
    num_owners: int
    runs: tuple[Run, ...]  # by owner, then by tensor
    slices: tuple[Slice, ...]
    buckets: tuple[Bucket, ...]  # in sending order

    def file_bytes(self, owner: int) -> int:
        """Size of an owner's file."""
        return sum(run.num_bytes for run in self.runs if run.owner == owner)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


REPLICATED = None
Rows = Sequence[tuple[int, int]] | None


def make_plan(tensors: Sequence[TensorSpec], rows: Sequence[Rows], *, num_owners: int, bucket_bytes: int) -> TransferPlan:
    """Plan of a version.

    rows[t]: per owner (first_row, num_rows) of tensor t, in rank order, empty ones with num_rows 0; None where every
    owner holds the whole tensor: then the owner with the fewest bytes so far gets it, largest tensors first.
    Raises ValueError naming the tensor whose rows are not covered exactly once.
    """
    if bucket_bytes < 1 or num_owners < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} and num_owners={num_owners} must be at least 1")
    if len(rows) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors but row ranges of {len(rows)}")
    owned = _owned_rows(tensors, rows, num_owners)
    runs = _runs(tensors, owned, num_owners)
    buckets, index = _buckets(runs, num_owners, bucket_bytes)
    slices = [piece for run in runs for piece in _cut(run, bucket_bytes, index)]
    slices.sort(key=lambda piece: (piece.bucket, piece.bucket_offset))
    return TransferPlan(
        tensors=tuple(tensors), num_owners=num_owners, runs=tuple(runs), slices=tuple(slices), buckets=tuple(buckets)
    )


def _owned_rows(tensors: Sequence[TensorSpec], rows: Sequence[Rows], num_owners: int) -> list[list[tuple[int, int]]]:
    """Per tensor and owner (first_row, num_rows), replicated tensors given to one owner each."""
    owned: list[list[tuple[int, int]]] = [[] for _ in tensors]
    load = [0] * num_owners
    for t, ranges in enumerate(rows):
        if ranges is not None:
            _check_cover(tensors[t], ranges, num_owners)
            owned[t] = list(ranges)
            for owner, (_, count) in enumerate(ranges):
                load[owner] += count * tensors[t].row_bytes
    replicated = [t for t, ranges in enumerate(rows) if ranges is None]
    for t in sorted(replicated, key=lambda t: (-tensors[t].num_bytes, t)):
        chosen = min(range(num_owners), key=lambda owner: (load[owner], owner))
        load[chosen] += tensors[t].num_bytes
        owned[t] = [(0, tensors[t].num_rows if owner == chosen else 0) for owner in range(num_owners)]
    return owned


def _check_cover(tensor: TensorSpec, ranges: Sequence[tuple[int, int]], num_owners: int) -> None:
    if len(ranges) != num_owners:
        raise ValueError(f"tensor {tensor.name}: row ranges of {len(ranges)} owners, but there are {num_owners}")
    at = 0
    for owner, (first, count) in enumerate(ranges):
        if count and first != at:
            raise ValueError(f"tensor {tensor.name}: owner {owner} starts at row {first}, but the rows before it end at {at}")
        at += count
    if at != tensor.num_rows:
        raise ValueError(f"tensor {tensor.name}: owners hold {at} rows, but it has {tensor.num_rows}")


def _runs(tensors: Sequence[TensorSpec], owned: Sequence[Sequence[tuple[int, int]]], num_owners: int) -> list[Run]:
    runs = []
    for owner in range(num_owners):
        at = 0
        for t, tensor in enumerate(tensors):
            first, count = owned[t][owner]
            size = count * tensor.row_bytes
            if size:
                runs.append(Run(tensor=t, owner=owner, tensor_offset=first * tensor.row_bytes, num_bytes=size, file_offset=at))
                at += size
    return runs


def _buckets(runs: Sequence[Run], num_owners: int, bucket_bytes: int) -> tuple[list[Bucket], dict[tuple[int, int], int]]:
    """Buckets in sending order, and from (owner, number among the owner's buckets) to its index."""
    sizes = [0] * num_owners
    for run in runs:
        sizes[run.owner] += run.num_bytes
    buckets: list[Bucket] = []
    index: dict[tuple[int, int], int] = {}
    for turn in range(max(-(-size // bucket_bytes) for size in sizes)):
        for owner, size in enumerate(sizes):
            start = turn * bucket_bytes
            if start < size:
                index[owner, turn] = len(buckets)
                buckets.append(Bucket(owner=owner, num_bytes=min(bucket_bytes, size - start), file_offset=start))
    return buckets, index


def _cut(run: Run, bucket_bytes: int, index: dict[tuple[int, int], int]) -> list[Slice]:
    """A run's slices: cut where the owner's file passes from one bucket to the next."""
    pieces = []
    at, end = run.file_offset, run.file_offset + run.num_bytes
    while at < end:
        turn = at // bucket_bytes
        stop = min(end, (turn + 1) * bucket_bytes)
        pieces.append(
            Slice(
                tensor=run.tensor,
                tensor_offset=run.tensor_offset + at - run.file_offset,
                num_bytes=stop - at,
                owner=run.owner,
                bucket=index[run.owner, turn],
                bucket_offset=at - turn * bucket_bytes,
            )
        )
        at = stop
    return pieces
