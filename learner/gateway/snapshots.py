"""Published snapshots in shared memory: which are kept, and how their bytes reach late or far replicas.

A snapshot is a folder `<incarnation>-<policy_step>` with manifest.bin (a serialized Manifest whose version is filled in
here) and rank-R.bin of every rank. The two newest stay; readers map a whole snapshot before the first byte leaves, so
deleting a folder never takes bytes from under them.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc

from learner.gateway.refusals import Refused
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rpc import CHUNK_BYTES

logger = logging.getLogger("headrace.learner.snapshots")

KEPT = 2
_FOLDER = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One published version on this node. Example: version 7 in /dev/shm/headrace-r1/1733-6."""

    version: int
    folder: Path
    manifest: manifest_pb2.Manifest  # with version, lineage and policy_step filled in


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of one bucket, at most CHUNK_BYTES."""

    bucket: int
    offset: int  # first byte inside the bucket
    data: bytes


def load(folder: Path, policy_step: int) -> manifest_pb2.Manifest:
    """Reads the manifest and checks the folder. Raises ValueError naming the file that is absent, short or unreadable."""
    path = folder / "manifest.bin"
    try:
        manifest = manifest_pb2.Manifest.FromString(path.read_bytes())
    except Exception as error:  # OSError, or protobuf's DecodeError, which has no common base worth naming
        raise ValueError(f"snapshot of step {policy_step}: {path} cannot be read: {type(error).__name__}: {error}") from error
    for bucket, part in enumerate(manifest.buckets):
        file = folder / f"rank-{part.owner}.bin"
        size = file.stat().st_size if file.is_file() else -1
        if size < part.file_offset + part.num_bytes:
            raise ValueError(
                f"snapshot of step {policy_step}: bucket {bucket} ends at byte {part.file_offset + part.num_bytes} of {file}, "
                f"which has {size} bytes (-1: absent); write every rank's file before CloseBatch"
            )
    return manifest


class Snapshots:
    """The registry. All methods run on the event loop; files are read in threads."""

    def __init__(self) -> None:
        self._kept: list[Snapshot] = []  # oldest first
        self.published: list[Callable[[Snapshot | None, Snapshot], None]] = []  # called with the version before and the new one; must not block

    @property
    def newest(self) -> Snapshot | None:
        return self._kept[-1] if self._kept else None

    def find(self, version: int) -> Snapshot | None:
        """The kept snapshot of a version, if it is still kept."""
        return next((snapshot for snapshot in self._kept if snapshot.version == version), None)

    async def publish(self, snapshot: Snapshot) -> None:
        """Makes it the newest and deletes what is no longer kept."""
        before = self.newest
        self._kept = [*(s for s in self._kept if s.folder != snapshot.folder), snapshot][-KEPT:]
        await asyncio.to_thread(_sweep, snapshot.folder, frozenset(s.folder.name for s in self._kept))
        for listener in self.published:
            listener(before, snapshot)

    async def read_newest(self) -> AsyncIterator[manifest_pb2.Manifest | Chunk]:
        """The newest snapshot: its manifest, then chunks in bucket order. Raises Refused NOT_FOUND or ABORTED."""
        snapshot = self.newest
        if snapshot is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, "no version is published yet; wait for Published")
        with ExitStack() as stack:
            try:
                maps = await asyncio.to_thread(_map_files, snapshot, stack)
            except FileNotFoundError as error:
                raise Refused(grpc.StatusCode.ABORTED, f"snapshot of version {snapshot.version} was replaced before it was opened ({error}); ask again") from None
            yield snapshot.manifest
            for bucket, part in enumerate(snapshot.manifest.buckets):
                for offset in range(0, part.num_bytes, CHUNK_BYTES):
                    start = part.file_offset + offset
                    end = min(start + CHUNK_BYTES, part.file_offset + part.num_bytes)
                    yield Chunk(bucket, offset, await asyncio.to_thread(maps[part.owner].__getitem__, slice(start, end)))

    def remove_all(self, parent: Path) -> None:
        """Deletes every snapshot of the run: nothing will be fetched any more."""
        self._kept = []
        shutil.rmtree(parent, ignore_errors=True)


def _map_files(snapshot: Snapshot, stack: ExitStack) -> dict[int, mmap.mmap]:
    """Maps the file of every owner that has bytes. Raises FileNotFoundError."""
    maps: dict[int, mmap.mmap] = {}
    for part in snapshot.manifest.buckets:
        if part.num_bytes and part.owner not in maps:
            with (snapshot.folder / f"rank-{part.owner}.bin").open("rb") as file:
                maps[part.owner] = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return maps


def _sweep(newest: Path, kept: frozenset[str]) -> None:
    """Deletes the older folders beside `newest`: earlier steps of its incarnation, and all of dead incarnations.

    Folders of later steps are being written and stay.
    """
    match = _FOLDER.fullmatch(newest.name)
    if match is None:
        logger.warning("snapshot folder %s is not named <incarnation>-<policy_step>; older snapshots beside it are left alone", newest)
        return
    ours = (int(match[1]), int(match[2]))
    for folder in newest.parent.iterdir():
        other = _FOLDER.fullmatch(folder.name)
        if other and folder.name not in kept and (int(other[1]), int(other[2])) < ours:
            shutil.rmtree(folder, ignore_errors=True)
