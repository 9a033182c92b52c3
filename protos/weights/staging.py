"""Staging of one version at the receiver: tensors that nothing samples from until they are whole and verified."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import marks
from protos.weights.blocks import Part, blocks, whole_part
from protos.weights.errors import TransferError
from protos.weights.side import Side

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # wide copies are what a GPU is good at
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALIGNED_BYTES = 256  # between tensors, so that each begins where a device reads fastest
_NAMED = 8  # tensors named in a message; the rest is counted


def digest(data: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of contiguous bytes, as the manifest holds it."""
    return xxhash.xxh3_64_intdigest(data.data)


def digests_of(windows: Iterable[tuple[int, npt.NDArray[np.uint8]]], sizes: Sequence[int]) -> list[int]:
    """Digests of runs of `sizes` bytes that lie one after another in what comes window by window."""
    left, found, state = list(sizes)[::-1], [], xxhash.xxh3_64()
    for _, window in windows:
        while left and len(window):
            count = min(left[-1], len(window))
            state.update(window[:count].data)
            window, left[-1] = window[count:], left[-1] - count
            if not left[-1]:
                left.pop()
                found.append(state.intdigest())
                state.reset()
    return found + [state.intdigest()] * len(left)  # what is left is empty


class VerifiedStaging:
    """All tensors of one version (or a worker's parts of them), every byte received once and every slice's digest checked. Made by
    `Staging.verify`."""

    def __init__(self, manifest: manifest_pb2.Manifest, storage: Sequence[torch.Tensor], parts: Sequence[Part]) -> None:
        self._manifest = manifest
        self._storage = storage
        self._parts = parts

    @property
    def version(self) -> int:
        return self._manifest.version

    @property
    def manifest(self) -> manifest_pb2.Manifest:
        return self._manifest

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(storage.numel() for storage in self._storage)

    def parts(self) -> Iterator[tuple[str, torch.dtype, Part, torch.Tensor]]:
        """(Hugging Face name, dtype, what of the tensor is kept, uint8 [part.num_rows, part.num_bytes]), in manifest order."""
        for tensor, storage, part in zip(self._manifest.tensors, self._storage, self._parts, strict=True):
            yield tensor.name, DTYPES[tensor.dtype], part, storage.view(part.num_rows, part.num_bytes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor of the manifest's shape and dtype), in manifest order. Views of the staging memory; of a tensor
        kept in part a scratch tensor, made when it is asked for, whose other bytes are unset."""
        for tensor, storage, part in zip(self._manifest.tensors, self._storage, self._parts, strict=True):
            if not part.is_whole:
                scratch = torch.empty(part.total_rows, part.row_bytes, dtype=torch.uint8, device=storage.device)
                rows = slice(part.first_row, part.first_row + part.num_rows)
                scratch[rows, part.first_byte : part.first_byte + part.num_bytes] = storage.view(part.num_rows, part.num_bytes)
                storage = scratch.view(-1)
            yield tensor.name, storage.view(DTYPES[tensor.dtype]).view(tuple(tensor.shape))


class Staging:
    """Tensors of a manifest on `device`, filled bucket by bucket or chunk by chunk.

    Raises TransferError at once when the manifest is not sound: slices that do not cover a tensor or a bucket exactly once
    (sender and receiver would cut differently), unknown dtypes, names twice.
    """

    def __init__(self, manifest: manifest_pb2.Manifest, device: torch.device | None = None, keep: Keep | None = None, *, side: Side | None = None) -> None:
        """keep: from (name, shape, itemsize) to the part of a tensor that is kept (None: all of every tensor). side: of the thread that fills it."""
        self.manifest = manifest
        self._by_bucket = checked(manifest)
        self._device = device = device or torch.device("cpu")
        self._side = side or Side(device)
        self._parts = [(keep or _keep_all)(t.name, tuple(t.shape), DTYPES[t.dtype].itemsize) for t in manifest.tensors]
        self._storage = _allocated([part.size for part in self._parts], device, manifest)
        self._good = [False] * len(manifest.slices)
        self._unverified = manifest.verify == manifest_pb2.VERIFY_OFF
        self._partial: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}  # bucket to (bytes, how many came)

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(storage.numel() for storage in self._storage)

    def write_bucket(self, bucket: int, data: torch.Tensor) -> None:
        """A whole bucket, uint8 [num_bytes] on the CPU or on staging's device. A slice with another digest stays missing."""
        indexes = sorted(self._by_bucket[bucket], key=lambda index: self.manifest.slices[index].bucket_offset)
        pieces = [self.manifest.slices[index] for index in indexes]
        with marks.span("digest"):
            found = [piece.digest for piece in pieces] if self._unverified else self._digests(data, [piece.num_bytes for piece in pieces])
        with marks.span("move"):
            data = self._side.moved(data)
        with marks.span("place"):
            for index, piece, value in zip(indexes, pieces, found, strict=True):
                if value == piece.digest:
                    place(piece, self._parts[piece.tensor], data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes], self._storage[piece.tensor])
                    self._good[index] = True
            if self._device.type == "cuda":  # the caller may fill the bucket again
                torch.cuda.current_stream(self._device).synchronize()

    def names_in(self, bucket: int) -> str:
        """The tensors of a bucket, for messages."""
        return names_in(self.manifest, self._by_bucket[bucket])

    def _digests(self, data: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """Of the slices of a bucket, which fill it one after another."""
        if data.device.type == "cpu":
            ends = list(accumulate(sizes))
            return [digest(data[end - size : end].numpy()) for size, end in zip(sizes, ends, strict=True)]
        return digests_of(self._side.windows.to_host(data), sizes)

    def write_chunk(self, bucket: int, offset: int, data: bytes) -> None:
        """Part of a bucket; chunks of one bucket come in order. Raises TransferError for one that does not fit there."""
        if bucket >= len(self.manifest.buckets):
            raise TransferError(f"chunk of bucket {bucket}, but version {self.manifest.version} has {len(self.manifest.buckets)} buckets")
        size = self.manifest.buckets[bucket].num_bytes
        buffer, have = self._partial.pop(bucket, (None, 0))
        if offset != have or offset + len(data) > size:
            raise TransferError(f"chunk of bucket {bucket} at {offset} with {len(data)} bytes, but {have} of its {size} bytes have come")
        if buffer is None:
            buffer = np.empty(size, dtype=np.uint8)
        buffer[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        if offset + len(data) == size:
            self.write_bucket(bucket, torch.from_numpy(buffer))
        else:
            self._partial[bucket] = (buffer, offset + len(data))

    def verify(self) -> VerifiedStaging:
        """Raises TransferError naming every tensor of which a slice did not come or came with other bytes."""
        bad = [index for index, good in enumerate(self._good) if not good]
        if not bad:
            return VerifiedStaging(self.manifest, self._storage, self._parts)
        names = list(dict.fromkeys(self.manifest.tensors[self.manifest.slices[index].tensor].name for index in bad))
        raise TransferError(
            f"version {self.manifest.version}: {len(bad)} of {len(self._good)} slices did not come or differ from their digest, in {len(names)} of "
            f"{len(self.manifest.tensors)} tensors: {some(names)}; the old weights stay"
        )


def _allocated(sizes: Sequence[int], device: torch.device, manifest: manifest_pb2.Manifest) -> list[torch.Tensor]:
    """One piece of memory, cut: a call of the driver for each tensor would hold up an engine that shares the device. Raises TransferError with
    the arithmetic where there is no room."""
    starts = list(accumulate((-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes), initial=0))
    try:
        memory = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise TransferError(no_room(sizes, manifest, device, free, total)) from None
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def no_room(sizes: Sequence[int], manifest: manifest_pb2.Manifest, device: torch.device, free: int, total: int) -> str:
    """What to say where staging does not fit. Bytes."""
    largest = max(range(len(sizes)), key=lambda index: sizes[index])
    return (
        f"version {manifest.version}: staging of {sum(sizes)} bytes (the largest of {len(sizes)} tensors is {manifest.tensors[largest].name}, {sizes[largest]} bytes) does not fit on "
        f"{device}, which has {free} of {total} bytes free; lower gpu_memory_fraction by at least {max(0.01, (sum(sizes) - free) / total):.2f}; the old weights stay"
    )


Keep = Callable[[str, tuple[int, ...], int], Part]


def _keep_all(name: str, shape: tuple[int, ...], itemsize: int) -> Part:
    return whole_part(shape, itemsize)


def place(piece: manifest_pb2.Slice, part: Part, data: torch.Tensor, storage: torch.Tensor) -> None:
    """Copies a slice's bytes (uint8, dense) to where they belong in the storage of what is kept of its tensor."""
    for block in blocks(part, offset=piece.tensor_offset, num_bytes=piece.num_bytes, num_runs=piece.num_runs, stride_bytes=piece.stride_bytes):
        word = _WORDS[math.gcd(8, block.source + data.storage_offset(), block.source_stride, block.target + storage.storage_offset(), block.target_stride, block.num_bytes, data.untyped_storage().data_ptr(), storage.untyped_storage().data_ptr())]
        rows = [(data, block.source, block.source_stride), (storage, block.target, block.target_stride)]
        source, target = (
            tensor.as_strided((block.num_rows, block.num_bytes), (stride or block.num_bytes, 1), tensor.storage_offset() + first) for tensor, first, stride in rows
        )  # fmt: skip
        target.view(word).copy_(source.view(word))


def from_folder(folder: Path, device: torch.device | None = None) -> VerifiedStaging:
    """Reads a snapshot folder (manifest.bin and rank-R.bin). Raises TransferError as a transfer would, and for short files."""
    return read_buckets(folder, manifest_pb2.Manifest.FromString((folder / "manifest.bin").read_bytes()), device)


def read_buckets(
    folder: Path, manifest: manifest_pb2.Manifest, device: torch.device | None = None, *, keep: Keep | None = None, cancelled: threading.Event | None = None, side: Side | None = None
) -> VerifiedStaging:
    """Reads every bucket out of the folder's rank-R.bin. Raises TransferError as a transfer would, for short files, and once cancelled."""
    staging = Staging(manifest, device, keep, side=side)
    for index, bucket in enumerate(manifest.buckets):
        if cancelled is not None and cancelled.is_set():
            raise TransferError(f"reading {folder} was given up")
        path = folder / f"rank-{bucket.owner}.bin"
        data = np.fromfile(path, dtype=np.uint8, count=bucket.num_bytes, offset=bucket.file_offset)
        if len(data) != bucket.num_bytes:
            raise TransferError(f"{path} is short: bucket {index} has {bucket.num_bytes} bytes at {bucket.file_offset}, {len(data)} were read")
        staging.write_bucket(index, torch.from_numpy(data))
    return staging.verify()


def check_names(manifest: manifest_pb2.Manifest, expected: Sequence[tuple[str, Sequence[int]]]) -> None:
    """Holds a full update against the (name, shape) pairs of the model it is for. Raises TransferError naming tensors that are
    missing, unknown or of another shape: a wrong prefix shows as all missing and all unknown."""
    have = {tensor.name: tuple(tensor.shape) for tensor in manifest.tensors}
    want = {name: tuple(shape) for name, shape in expected}
    missing, unknown = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    shapes = [f"{n} {list(have[n])} instead of {list(want[n])}" for n in sorted(have.keys() & want.keys()) if have[n] != want[n]]
    if missing or unknown or shapes:
        raise TransferError(
            f"version {manifest.version} does not fit the model: {len(have.keys() & want.keys())} of {len(want)} names match; "
            f"missing: {some(missing)}; unknown: {some(unknown)}; other shape: {some(shapes)}; the old weights stay"
        )


def tensor_bytes(tensor: manifest_pb2.Tensor) -> int:
    """Size in bytes. Raises TransferError for a dtype outside DTYPES."""
    if tensor.dtype not in DTYPES:
        raise TransferError(f"tensor {tensor.name} has dtype {tensor.dtype!r}; served dtypes are {', '.join(DTYPES)}")
    count = DTYPES[tensor.dtype].itemsize
    for size in tensor.shape:
        count *= size
    return count


def checked(manifest: manifest_pb2.Manifest) -> list[list[int]]:
    """Indexes of the slices of each bucket, once the manifest is found sound."""
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        raise TransferError(f"manifest of version {manifest.version} names a tensor twice: {some([n for n in names if names.count(n) > 1])}")
    by_bucket: list[list[int]] = [[] for _ in manifest.buckets]
    by_tensor: list[list[int]] = [[] for _ in manifest.tensors]
    for index, piece in enumerate(manifest.slices):
        if piece.bucket >= len(by_bucket) or piece.tensor >= len(by_tensor):
            raise TransferError(f"manifest of version {manifest.version}: slice {index} names bucket {piece.bucket} of {len(by_bucket)}, tensor {piece.tensor} of {len(by_tensor)}")
        by_bucket[piece.bucket].append(index)
        by_tensor[piece.tensor].append(index)
    for t, tensor in enumerate(manifest.tensors):
        spans = [span for i in by_tensor[t] for span in _spans(manifest.slices[i])]
        _check_cover(f"tensor {tensor.name}", spans, tensor_bytes(tensor))
    for b, bucket in enumerate(manifest.buckets):
        spans = [(manifest.slices[i].bucket_offset, manifest.slices[i].num_bytes) for i in by_bucket[b]]
        _check_cover(f"bucket {b} (with {names_in(manifest, by_bucket[b])})", spans, bucket.num_bytes)
    return by_bucket


def _spans(piece: manifest_pb2.Slice) -> list[tuple[int, int]]:
    """The runs of a slice. Raises TransferError where they are not equal."""
    runs = max(1, piece.num_runs)
    if piece.num_bytes % runs:
        raise TransferError(f"a slice of {piece.num_bytes} bytes is not {runs} equal runs")
    length = piece.num_bytes // runs
    return [(piece.tensor_offset + run * piece.stride_bytes, length) for run in range(runs)]


def _check_cover(what: str, spans: list[tuple[int, int]], size: int) -> None:
    at = 0
    for start, count in sorted(spans):
        if start != at:
            raise TransferError(f"{what}: slices {'leave a gap' if start > at else 'overlap'} at byte {min(at, start)} of {size}")
        at = start + count
    if at != size:
        raise TransferError(f"{what}: slices cover {at} bytes of {size}")


def some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more


def names_in(manifest: manifest_pb2.Manifest, slices: Iterable[int]) -> str:
    """The tensors of some slices, for messages."""
    return some(list(dict.fromkeys(manifest.tensors[manifest.slices[index].tensor].name for index in slices)))
