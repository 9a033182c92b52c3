"""Published snapshots in shared memory: which are kept, and how their bytes reach late or far replicas.

A snapshot is a folder `<incarnation>-<policy_step>` with manifest.bin (a serialized Manifest whose version is filled in
here) and rank-R.bin of every rank. The two newest stay; readers map a whole snapshot before the first byte leaves, so
deleting a folder never takes bytes from under them. What they map stays in memory, so at most MAX_READ snapshots are read at a
time: whoever wants another one waits, and a reader that takes nothing for STALL_S is let go.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from learner.gateway.bell import Bell
from learner.gateway.refusals import Refused
from protos.manifest.v1alpha1 import manifest_pb2
from protos.rpc import CHUNK_BYTES, deadline_s

logger = logging.getLogger("headrace.learner.snapshots")

KEPT = 2
MAX_READ = 3  # snapshots, each by any number of readers
STALL_S = 60.0  # for a reader to take one chunk
Message = TypeVar("Message")
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
        self._reading: Counter[Path] = Counter()  # folder to number of readers
        self._bell = Bell()
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

    async def send_newest(self, write: Callable[[manifest_pb2.Manifest | Chunk], Awaitable[None]]) -> None:
        """Writes the newest snapshot: its manifest, then chunks in bucket order. Waits while too many snapshots are being read.

        Raises Refused NOT_FOUND, or ABORTED when it was replaced before it was opened or the reader takes too long in all. write: see `patient`.
        """
        snapshot = await self._next_to_read()
        self._reading[snapshot.folder] += 1
        try:
            async with asyncio.timeout(deadline_s("FetchWeights")):
                async for part in _read(snapshot):
                    await write(part)
        except TimeoutError:
            raise _too_slow(f"version {snapshot.version} was not taken within {deadline_s('FetchWeights')} s") from None
        finally:
            self._reading[snapshot.folder] -= 1
            self._reading = +self._reading
            self._bell.ring()

    async def _next_to_read(self) -> Snapshot:
        while True:
            snapshot = self.newest
            if snapshot is None:
                raise Refused(grpc.StatusCode.NOT_FOUND, "no version is published yet; wait for Published")
            if snapshot.folder in self._reading or len(self._reading) < MAX_READ:
                return snapshot
            await self._bell.wait()

    def remove_all(self, parent: Path) -> None:
        """Deletes every snapshot of the run: nothing will be fetched any more."""
        self._kept = []
        shutil.rmtree(parent, ignore_errors=True)


def patient(write: Callable[[Message], Awaitable[None]]) -> Callable[[Message], Awaitable[None]]:
    """The same, raising Refused ABORTED when the reader takes nothing for STALL_S: what it reads stays in memory meanwhile."""

    async def within(part: Message) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await write(part)
        except TimeoutError:
            raise _too_slow(f"nothing was taken for {STALL_S:.0f} s") from None

    return within


def _too_slow(why: str) -> Refused:
    logger.warning("a reader of weights is let go: %s", why)
    return Refused(grpc.StatusCode.ABORTED, f"{why}; ask again")


async def _read(snapshot: Snapshot) -> AsyncIterator[manifest_pb2.Manifest | Chunk]:
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
