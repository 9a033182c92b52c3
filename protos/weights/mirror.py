"""A version's bytes as files on this machine: what was fetched lies here, deltas are applied here, peers read here.

    open(manifest) ─▶ write(bucket, offset, data) ... ─▶ close() ─▶ the engine reads and verifies ─▶ confirm()
    apply(plan, parts) ────────────────────────────────────────────▶ likewise

From the first write until `confirm` it holds no version: what failed or was cut off in between is never built upon again, the next
fetch is full. The engine's own weights are a copy of their own; they serve on meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import delta
from protos.weights.errors import TransferError
from protos.weights.history import History, Step
from protos.weights.staging import names_in

FILE, _LOCK = "rank-0.bin", "lock"
PREFIX = "headrace-mirror-"


def sweep(parent: Path) -> list[str]:
    """Removes mirrors of processes that are gone (nobody holds their lock), and names them: a killed replica leaves its own behind."""
    gone = []
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        try:
            with lock.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                gone.append(lock.parent.name)
        except OSError:
            continue  # somebody's, or removed meanwhile
    return gone


class Mirror:
    """`folder` is made on first use and removed by `remove`. Methods may be called from several threads, one change at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = History()
        self.num_deltas = 0  # applied since the last full copy
        self.generation = 0  # rises with every change, so that a reader notices one under its hands
        self._lock = threading.Lock()
        self._version = 0
        self._manifest = manifest_pb2.Manifest()
        self._source = manifest_pb2.Manifest()  # as announced: its layout names the deltas that fit
        self._data: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._filled: list[int] = []  # bytes that came, for each bucket
        self._claimed: BinaryIO | None = None

    @property
    def version(self) -> int:
        """Whole and confirmed; 0: none."""
        return self._version

    @property
    def layout(self) -> int:
        """Layout digest of the confirmed version; 0: none."""
        return delta.layout_digest(self._source) if self._version else 0

    @property
    def manifest(self) -> manifest_pb2.Manifest:
        """Of what lies here, its buckets being this folder's."""
        return self._manifest

    @property
    def announced(self) -> manifest_pb2.Manifest:
        """As the source sent it, to be sent on."""
        return self._source

    def open(self, manifest: manifest_pb2.Manifest) -> None:
        """Begins a full copy. Raises OSError with the arithmetic where the disk has no room."""
        with self._lock:
            self._doubt()
            self.history.clear()
            self.num_deltas = 0
            self._take(manifest)
            size = sum(bucket.num_bytes for bucket in manifest.buckets)
            self._filled = [0] * len(manifest.buckets)
            self._data = self._mapped(size)

    def write(self, bucket: int, offset: int, data: bytes) -> None:
        """Part of a bucket; chunks of one bucket come in order. Raises TransferError for one that does not fit there."""
        if bucket >= len(self._filled) or offset != self._filled[bucket] or offset + len(data) > self._manifest.buckets[bucket].num_bytes:
            have = f"{self._filled[bucket]} of its {self._manifest.buckets[bucket].num_bytes} bytes have come" if bucket < len(self._filled) else f"there are {len(self._filled)}"
            raise TransferError(f"chunk of bucket {bucket} at {offset} with {len(data)} bytes, but {have}")
        start = self._manifest.buckets[bucket].file_offset + offset
        self._data[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
        self._filled[bucket] += len(data)

    def close(self) -> None:
        """Ends a full copy. Raises TransferError where bytes are missing."""
        if lacking := self.lacking():
            raise TransferError(f"version {self._manifest.version} ended early: {lacking}; the old weights stay")

    def lacking(self) -> str:
        """Which buckets of a full copy, with which tensors, are not whole; "" where all are."""
        buckets = [index for index, bucket in enumerate(self._manifest.buckets) if self._filled[index] != bucket.num_bytes]
        if not buckets:
            return ""
        names = names_in(self._manifest, (index for index, piece in enumerate(self._manifest.slices) if piece.bucket == buckets[0]))
        return f"{len(buckets)} of {len(self._filled)} buckets are not whole, the first is {buckets[0]} with {names}"

    def apply(self, manifest: manifest_pb2.Manifest, plan: manifest_pb2.DeltaPlan, parts: Sequence[manifest_pb2.DeltaPart]) -> None:
        """Brings the confirmed version to the manifest's. Raises TransferError, and nothing is changed, for a chain or a part that is
        not what was announced; once writing has begun it never ends as a version without `confirm`."""
        with self._lock:
            delta.check_plan(plan, have_version=self._version, version=manifest.version)
            if delta.layout_digest(manifest) != self.layout:
                raise TransferError(f"a delta to version {manifest.version} is of another layout than version {self._version} here")
            if len(parts) != sum(step.num_parts for step in plan.steps):
                raise TransferError(f"a delta ended after {len(parts)} of {sum(step.num_parts for step in plan.steps)} parts; nothing was applied")
            for part in parts:
                delta.check_part(part)
            layout, steps, rest = self.layout, [], iter(parts)
            self._doubt()
            for step in plan.steps:
                mine = [next(rest) for _ in range(step.num_parts)]
                for part in mine:
                    delta.apply_part(self._bucket(part.bucket), part)
                steps.append(Step(from_version=step.from_version, to_version=step.to_version, parts=mine))
            self._take(manifest)
            for made in steps:
                self.history.add(made, layout=layout, total_bytes=self._data.size)
            self.num_deltas += len(steps)

    def confirm(self) -> None:
        """What lies here was verified: it is the manifest's version."""
        self._version = self._manifest.version

    def doubt(self) -> None:
        """What lies here is no version any more."""
        with self._lock:
            self._doubt()

    def read(self, bucket: int, offset: int, size: int) -> bytes:
        """Bytes of a bucket, at most `size`."""
        return self._bucket(bucket)[offset : offset + size].tobytes()

    def remove(self) -> None:
        """Gives the memory back."""
        with self._lock:
            self._doubt()
            self.history.clear()
            self._data, self._manifest, self._filled = np.empty(0, dtype=np.uint8), manifest_pb2.Manifest(), []
            if self._claimed is not None:
                self._claimed.close()
                self._claimed = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _doubt(self) -> None:
        self._version = 0
        self.generation += 1

    def _bucket(self, index: int) -> npt.NDArray[np.uint8]:
        if index >= len(self._manifest.buckets):
            raise TransferError(f"bucket {index} of {len(self._manifest.buckets)}")
        bucket = self._manifest.buckets[index]
        return self._data[bucket.file_offset : bucket.file_offset + bucket.num_bytes]

    def _take(self, manifest: manifest_pb2.Manifest) -> None:
        """Buckets lie one after the other in the one file here."""
        self._source = manifest
        self._manifest = manifest_pb2.Manifest()
        self._manifest.CopyFrom(manifest)
        at = 0
        for bucket in self._manifest.buckets:
            bucket.owner, bucket.root, bucket.file_offset = 0, 0, at
            at += bucket.num_bytes

    def _claim(self) -> None:
        """Makes the folder and holds a lock in it for as long as this process lives."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._claimed is None:
            self._claimed = (self.folder / _LOCK).open("ab")
            fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _mapped(self, size: int) -> npt.NDArray[np.uint8]:
        self._claim()
        path = self.folder / FILE
        path.touch()
        if not size:
            return np.empty(0, dtype=np.uint8)
        with path.open("rb+") as file:
            os.ftruncate(file.fileno(), size)
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS at the first touch
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                free = shutil.disk_usage(self.folder).free
                raise OSError(error.errno, f"a copy of the weights needs {size} bytes, {free} are free; give mirror_dir a larger place", str(self.folder)) from None
        return np.memmap(path, dtype=np.uint8, mode="r+", shape=(size,))
