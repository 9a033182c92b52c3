"""Which part of a tensor each rank holds: a pure function of the mesh and the placements, as torch's DTensor cuts them.

A placement is, for each dimension of the mesh, a Split of one dimension of the tensor or None (replicated). FSDP2 is one Split,
HSDP is None and a Split, FSDP2 over tensor parallelism is two of them; a rank of another pipeline stage holds nothing.

    shape (8, 4), mesh ((0, 1), (2, 3)) of dp × tp, placements (Split(0), Split(1)):   rank 3 holds rows 4..8 of columns 2..4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # for each dimension of the tensor (first index, count); () for a scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Cut along one dimension as torch.chunk does: parts of ceil(n / k), the last ones smaller or empty.

    Example: Split(dim=0). `strided`: cut after the mesh dimensions to its right that cut the same dimension (torch's _StridedShard,
    which FSDP2 makes over tensor parallelism), into which `factor` says they have cut it already.
    """

    dim: int
    strided: bool = False
    factor: int = 1


def whole(shape: Sequence[int]) -> Box:
    """The box of the whole tensor."""
    return tuple((0, size) for size in shape)


def num_elements(box: Box) -> int:
    count = 1
    for _, size in box:
        count *= size
    return count


def held(shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Split | None]) -> Box:
    """The box at one coordinate of the mesh; may be empty.

    Raises ValueError for a dimension that the tensor lacks, and for a strided cut whose factor is not what the mesh to its right makes.
    """
    box = list(whole(shape))
    for axis in _order(placements):
        split = placements[axis]
        assert split is not None
        if not 0 <= split.dim < len(shape):
            raise ValueError(f"placement {split} of a tensor of shape {tuple(shape)}: it has no dimension {split.dim}")
        if split.strided:
            made = 1
            for right in range(axis + 1, len(placements)):
                other = placements[right]
                if other is not None and other.dim == split.dim:
                    made *= mesh_shape[right]
            if made != split.factor:
                raise ValueError(f"placement {split}: the mesh dimensions to its right cut dimension {split.dim} into {made}, not into {split.factor}")
        box[split.dim] = _chunk(box[split.dim], mesh_shape[axis], coordinate[axis])
    return tuple(box)


def _order(placements: Sequence[Split | None]) -> list[int]:
    """Mesh dimensions in the order in which they cut: plain ones from left to right, then strided ones from right to left."""
    plain = [axis for axis, split in enumerate(placements) if split is not None and not split.strided]
    strided = [axis for axis, split in enumerate(placements) if split is not None and split.strided]
    return [*plain, *reversed(strided)]


def _chunk(span: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    start, count = span
    size = -(-count // parts)
    first = min(index * size, count)
    return start + first, min(first + size, count) - first
