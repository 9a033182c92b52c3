"""Staging of one version at the receiver: tensors that nothing samples from until they are whole and verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMED = 8  # tensors named in a message; the rest is counted


def digest(data: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of contiguous bytes, as the manifest holds it."""
    return xxhash.xxh3_64_intdigest(data.data)


class VerifiedStaging:
    """All tensors of one version, every byte received once and every slice's digest checked. Made by `Staging.verify`."""

    def __init__(self, manifest: manifest_pb2.Manifest, storage: Sequence[torch.Tensor]) -> None:
        self._manifest = manifest
        self._storage = storage

    @property
    def version(self) -> int:
        return self._manifest.version

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor of the manifest's shape and dtype), in manifest order. Views of the staging memory."""
        for tensor, storage in zip(self._manifest.tensors, self._storage, strict=True):
            yield tensor.name, storage.view(DTYPES[tensor.dtype]).view(tuple(tensor.shape))


class Staging:
    """Tensors of a manifest on `device`, filled bucket by bucket or chunk by chunk.

    Raises TransferError at once when the manifest is not sound: slices that do not cover a tensor or a bucket exactly once
    (sender and receiver would cut differently), unknown dtypes, names twice.
    """

    def __init__(self, manifest: manifest_pb2.Manifest, device: torch.device | None = None) -> None:
        self.manifest = manifest
        self._by_bucket = _checked(manifest)
        device = device or torch.device("cpu")
        self._storage = [torch.empty(tensor_bytes(t), dtype=torch.uint8, device=device) for t in manifest.tensors]
        self._good = [False] * len(manifest.slices)
        self._partial: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}  # bucket to (bytes, how many came)

    def write_bucket(self, bucket: int, data: torch.Tensor) -> None:
        """A whole bucket, uint8 [num_bytes] on the CPU or on staging's device. A slice with another digest stays missing."""
        host = data if data.device.type == "cpu" else data.cpu()
        array = host.numpy()
        for index in self._by_bucket[bucket]:
            piece = self.manifest.slices[index]
            start, stop = piece.bucket_offset, piece.bucket_offset + piece.num_bytes
            if digest(array[start:stop]) == piece.digest:
                at = piece.tensor_offset
                self._storage[piece.tensor][at : at + piece.num_bytes].copy_(data[start:stop])
                self._good[index] = True

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
            return VerifiedStaging(self.manifest, self._storage)
        names = list(dict.fromkeys(self.manifest.tensors[self.manifest.slices[index].tensor].name for index in bad))
        raise TransferError(
            f"version {self.manifest.version}: {len(bad)} of {len(self._good)} slices did not come or differ from their digest, in {len(names)} of "
            f"{len(self.manifest.tensors)} tensors: {_some(names)}; the old weights stay"
        )


def from_folder(folder: Path, device: torch.device | None = None) -> VerifiedStaging:
    """Reads a snapshot folder (manifest.bin and rank-R.bin). Raises TransferError as a transfer would, and for short files."""
    manifest = manifest_pb2.Manifest.FromString((folder / "manifest.bin").read_bytes())
    staging = Staging(manifest, device)
    for index, bucket in enumerate(manifest.buckets):
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
            f"missing: {_some(missing)}; unknown: {_some(unknown)}; other shape: {_some(shapes)}; the old weights stay"
        )


def tensor_bytes(tensor: manifest_pb2.Tensor) -> int:
    """Size in bytes. Raises TransferError for a dtype outside DTYPES."""
    if tensor.dtype not in DTYPES:
        raise TransferError(f"tensor {tensor.name} has dtype {tensor.dtype!r}; served dtypes are {', '.join(DTYPES)}")
    count = DTYPES[tensor.dtype].itemsize
    for size in tensor.shape:
        count *= size
    return count


def _checked(manifest: manifest_pb2.Manifest) -> list[list[int]]:
    """Indexes of the slices of each bucket, once the manifest is found sound."""
    names = [tensor.name for tensor in manifest.tensors]
    if len(set(names)) != len(names):
        raise TransferError(f"manifest of version {manifest.version} names a tensor twice: {_some([n for n in names if names.count(n) > 1])}")
    by_bucket: list[list[int]] = [[] for _ in manifest.buckets]
    by_tensor: list[list[int]] = [[] for _ in manifest.tensors]
    for index, piece in enumerate(manifest.slices):
        if piece.bucket >= len(by_bucket) or piece.tensor >= len(by_tensor):
            raise TransferError(f"manifest of version {manifest.version}: slice {index} names bucket {piece.bucket} of {len(by_bucket)}, tensor {piece.tensor} of {len(by_tensor)}")
        by_bucket[piece.bucket].append(index)
        by_tensor[piece.tensor].append(index)
    for t, tensor in enumerate(manifest.tensors):
        spans = [(manifest.slices[i].tensor_offset, manifest.slices[i].num_bytes) for i in by_tensor[t]]
        _check_cover(f"tensor {tensor.name}", spans, tensor_bytes(tensor))
    for b, bucket in enumerate(manifest.buckets):
        spans = [(manifest.slices[i].bucket_offset, manifest.slices[i].num_bytes) for i in by_bucket[b]]
        inside = _some(list(dict.fromkeys(names[manifest.slices[i].tensor] for i in by_bucket[b])))
        _check_cover(f"bucket {b} (with {inside})", spans, bucket.num_bytes)
    return by_bucket


def _check_cover(what: str, spans: list[tuple[int, int]], size: int) -> None:
    at = 0
    for start, count in sorted(spans):
        if start != at:
            raise TransferError(f"{what}: slices {'leave a gap' if start > at else 'overlap'} at byte {min(at, start)} of {size}")
        at = start + count
    if at != size:
        raise TransferError(f"{what}: slices cover {at} bytes of {size}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "none") + more
