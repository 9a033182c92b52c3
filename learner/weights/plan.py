"""Who sends which bytes of a policy version, in which order: a pure function of shapes and of what each rank holds.

Rank r's file is the concatenation of its runs (its parts of the tensors), cut every `bucket_bytes`; a slice is the part of a run
inside one bucket. What several ranks hold is sent by one of them. Buckets are sent round by round, one of each root, so that every
root's link is in use from the start.

    tensor a [4, 2] of 4-byte elements on two ranks, two rows each; bucket_bytes=12:
    rank 0: a[0:16) -> bucket 0 = a[0:12), bucket 2 = a[12:16)      rank 1: a[16:32) -> bucket 1 = a[16:28), bucket 3 = a[28:32)
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from learner.weights.placement import Box, num_elements, whole
from learner.weights.roots import MAX_ROOTS, assign_roots

SPLIT_BYTES = 4 << 20  # a part that several ranks hold is shared out between them from this size on, else given to one


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Example: TensorSpec(name="model.norm.weight", shape=(64,), dtype="bfloat16", itemsize=2)"""

    name: str
    shape: tuple[int, ...]  # of the whole tensor; () is one row of one element
    itemsize: int  # bytes of one element as served
    dtype: str = ""  # torch name of the served dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Bytes of a row-major tensor: equal runs at equal distances. Example: columns 2..4 of an (8, 4) tensor of 2-byte elements are
    Region(offset=4, run_bytes=4, num_runs=8, stride_bytes=8)"""

    offset: int
    run_bytes: int
    num_runs: int  # at least 1
    stride_bytes: int  # 0 where there is one run

    @property
    def num_bytes(self) -> int:
        return self.run_bytes * self.num_runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One owner's part of one tensor; dense in its file. Example: Run(tensor=0, owner=1, box=((2, 2), (0, 2)), region=..., file_offset=0)"""

    tensor: int
    owner: int
    box: Box
    region: Region
    file_offset: int  # first byte in the owner's file

    @property
    def num_bytes(self) -> int:
        return self.region.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The part of a run inside one bucket. Fields as in the manifest."""

    tensor: int
    region: Region
    owner: int
    bucket: int
    bucket_offset: int

    @property
    def num_bytes(self) -> int:
        return self.region.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What is sent at once: bytes of the owner's file, by its root. Example: Bucket(owner=1, num_bytes=4, file_offset=12, root=1)"""

    owner: int
    num_bytes: int
    file_offset: int
    root: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferPlan:
    """The whole plan, equal on all ranks. Slices are in sending order: by bucket, then by offset inside it."""

    tensors: tuple[TensorSpec, ...]
    num_owners: int
    runs: tuple[Run, ...]  # by owner, then by file offset
    slices: tuple[Slice, ...]
    buckets: tuple[Bucket, ...]  # in sending order

    def file_bytes(self, owner: int) -> int:
        """Size of an owner's file."""
        return sum(run.num_bytes for run in self.runs if run.owner == owner)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def make_plan(
    tensors: Sequence[TensorSpec],
    held: Sequence[Sequence[Box | None]],
    *,
    bucket_bytes: int,
    max_roots: int = MAX_ROOTS,
    hosts: Sequence[int] | None = None,
    split_bytes: int = SPLIT_BYTES,
) -> TransferPlan:
    """Plan of a version.

    held[t][rank]: the box of tensor t that the rank holds; empty or None: nothing of it. The different boxes of a tensor tile it.
    hosts[rank]: the node of each rank (None: one node); a root sends files of its own node, so every node has at least one root,
    also where that makes more than max_roots.
    Raises ValueError naming the tensor that is not covered exactly once, or of which a box is no regular run of bytes.
    """
    num_owners = len(held[0]) if held else 1
    if bucket_bytes < 1 or max_roots < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} and max_roots={max_roots} must be at least 1")
    if len(held) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors but boxes of {len(held)}")
    for tensor, boxes in zip(tensors, held, strict=True):
        check_tiling(tensor, boxes, num_owners)
    owned = _owned(tensors, held, num_owners, split_bytes)
    runs = _runs(tensors, owned, num_owners)
    sizes = [0] * num_owners
    for run in runs:
        sizes[run.owner] += run.num_bytes
    buckets, index = _buckets(sizes, bucket_bytes, assign_roots(sizes, hosts or [0] * num_owners, max_roots))
    slices = [piece for run in runs for piece in _cut(run, bucket_bytes, index)]
    slices.sort(key=lambda piece: (piece.bucket, piece.bucket_offset))
    return TransferPlan(tensors=tuple(tensors), num_owners=num_owners, runs=tuple(runs), slices=tuple(slices), buckets=tuple(buckets))


def region_of(shape: Sequence[int], itemsize: int, box: Box) -> Region:
    """The bytes of a box of a row-major tensor. Raises ValueError for a box that is not equal runs at equal distances."""
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    cut = [dim for dim, (_, count) in enumerate(box) if count != shape[dim]]
    if not cut:
        return Region(offset=0, run_bytes=math.prod(shape) * itemsize, num_runs=1, stride_bytes=0)
    last = cut[-1]
    run_bytes = box[last][1] * strides[last]
    leading = [dim for dim in range(last) if box[dim][1] != 1]
    if not leading:
        return Region(offset=offset, run_bytes=run_bytes, num_runs=1, stride_bytes=0)
    if any(dim in cut for dim in range(leading[0] + 1, last)):
        raise ValueError(f"box {box} of shape {tuple(shape)} is cut in three dimensions; weights can be sent from shards that cut at most two, or neighbouring ones")
    return Region(offset=offset, run_bytes=run_bytes, num_runs=math.prod(box[dim][1] for dim in range(last)), stride_bytes=strides[last - 1])


def check_tiling(tensor: TensorSpec, boxes: Sequence[Box | None], num_owners: int) -> None:
    """Raises ValueError naming the tensor unless its different boxes are disjoint and fill it."""
    if len(boxes) != num_owners:
        raise ValueError(f"tensor {tensor.name}: boxes of {len(boxes)} ranks, but there are {num_owners}")
    different = sorted({box for box in boxes if box is not None and num_elements(box)})
    for box in different:
        if len(box) != len(tensor.shape) or any(start < 0 or start + count > size for (start, count), size in zip(box, tensor.shape, strict=True)):
            raise ValueError(f"tensor {tensor.name}: box {box} does not lie in shape {tensor.shape}")
    for index, box in enumerate(different):
        for other in different[index + 1 :]:
            if all(a < c + d and c < a + b for (a, b), (c, d) in zip(box, other, strict=True)):
                raise ValueError(f"tensor {tensor.name}: boxes {box} and {other} overlap; ranks must hold equal or disjoint parts")
    filled, size = sum(num_elements(box) for box in different), math.prod(tensor.shape)
    if filled != size:
        raise ValueError(f"tensor {tensor.name}: the ranks hold {filled} of its {size} elements")


def _owned(tensors: Sequence[TensorSpec], held: Sequence[Sequence[Box | None]], num_owners: int, split_bytes: int) -> list[tuple[int, int, Box]]:
    """(tensor, owner, box): every box once. What one rank holds is its own; the rest, largest first, goes to whoever holds it and has least."""
    owned: list[tuple[int, int, Box]] = []
    shared: list[tuple[int, int, tuple[int, ...], Box]] = []
    load = [0] * num_owners
    for t, boxes in enumerate(held):
        holders: dict[Box, list[int]] = defaultdict(list)
        for rank, box in enumerate(boxes):
            if box is not None and num_elements(box):
                holders[box].append(rank)
        for box, ranks in holders.items():
            size = num_elements(box) * tensors[t].itemsize
            if len(ranks) == 1:
                owned.append((t, ranks[0], box))
                load[ranks[0]] += size
            else:
                shared.append((size, t, tuple(ranks), box))
    for size, t, several, box in sorted(shared, key=lambda item: (-item[0], item[1], item[3])):
        for part in _parts(box, len(several)) if size >= split_bytes else [box]:
            chosen = min(several, key=lambda rank: (load[rank], rank))
            load[chosen] += num_elements(part) * tensors[t].itemsize
            owned.append((t, chosen, part))
    return owned


def _parts(box: Box, count: int) -> list[Box]:
    """The box cut into nearly equal parts along its first dimension that has more than one index."""
    dim = next((dim for dim, (_, size) in enumerate(box) if size > 1), None)
    if dim is None:
        return [box]
    start, size = box[dim]
    ends = [start + part * size // count for part in range(count + 1)]
    return [(*box[:dim], (first, end - first), *box[dim + 1 :]) for first, end in itertools.pairwise(ends) if end > first]


def _runs(tensors: Sequence[TensorSpec], owned: Sequence[tuple[int, int, Box]], num_owners: int) -> list[Run]:
    """Each owner's file: wide elements first, so that every run is aligned to its own."""
    at = [0] * num_owners
    runs = []
    for t, owner, box in sorted(owned, key=lambda item: (item[1], -tensors[item[0]].itemsize, item[0], item[2])):
        try:
            region = region_of(tensors[t].shape, tensors[t].itemsize, box)
        except ValueError as error:
            raise ValueError(f"tensor {tensors[t].name}: {error}") from None
        runs.append(Run(tensor=t, owner=owner, box=box, region=region, file_offset=at[owner]))
        at[owner] += region.num_bytes
    return runs


def _buckets(sizes: Sequence[int], bucket_bytes: int, root: Sequence[int]) -> tuple[list[Bucket], dict[tuple[int, int], int]]:
    """Buckets in sending order, and from (owner, number among the owner's buckets) to its index."""
    queues: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for owner, size in enumerate(sizes):
        queues[root[owner]] += [(owner, number) for number in range(-(-size // bucket_bytes))]
    buckets: list[Bucket] = []
    index: dict[tuple[int, int], int] = {}
    for turn in range(max((len(queue) for queue in queues.values()), default=0)):
        for sender in sorted(queues):
            if turn < len(queues[sender]):
                owner, number = queues[sender][turn]
                start = number * bucket_bytes
                index[owner, number] = len(buckets)
                buckets.append(Bucket(owner=owner, num_bytes=min(bucket_bytes, sizes[owner] - start), file_offset=start, root=sender))
    return buckets, index


def _cut(run: Run, bucket_bytes: int, index: dict[tuple[int, int], int]) -> list[Slice]:
    """A run's slices: cut where the owner's file passes from one bucket to the next."""
    pieces = []
    at, end = run.file_offset, run.file_offset + run.num_bytes
    while at < end:
        number = at // bucket_bytes
        stop = min(end, (number + 1) * bucket_bytes)
        offset = at - number * bucket_bytes
        for region in sub_regions(run.region, at - run.file_offset, stop - run.file_offset):
            pieces.append(Slice(tensor=run.tensor, region=region, owner=run.owner, bucket=index[run.owner, number], bucket_offset=offset))
            offset += region.num_bytes
        at = stop
    return pieces


def sub_regions(region: Region, start: int, stop: int) -> list[Region]:
    """Bytes [start, stop) of a region's dense form: the rest of a run, whole runs, the beginning of one."""
    length, found = region.run_bytes, []

    def add(at: int, num_bytes: int, num_runs: int) -> None:
        offset = region.offset + at // length * region.stride_bytes + at % length if region.num_runs > 1 else region.offset + at
        found.append(Region(offset=offset, run_bytes=num_bytes // num_runs, num_runs=num_runs, stride_bytes=region.stride_bytes if num_runs > 1 else 0))

    if region.num_runs == 1:
        add(start, stop - start, 1)
        return found
    if start % length:
        head = min(stop, (start // length + 1) * length)
        add(start, head - start, 1)
        start = head
    if runs := (stop - start) // length:
        add(start, runs * length, runs)
        start += runs * length
    if start < stop:
        add(start, stop - start, 1)
    return found


def whole_on_all(tensor: TensorSpec, num_owners: int) -> list[Box | None]:
    """Boxes of a tensor that every rank holds whole."""
    return [whole(tensor.shape)] * num_owners
