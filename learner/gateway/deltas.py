"""What has changed from version to version, for replicas that say what they have: computed in a thread from two snapshots, kept as a
bounded chain. Nothing is computed before the first replica asks.

    published: consumes the two newest snapshots, produces a step; waits for its thread        chain: waits for the step that is being made
"""

from __future__ import annotations

import asyncio
import logging
import mmap

import numpy as np

from learner.gateway.snapshots import Snapshot, Snapshots
from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights import delta
from protos.weights.history import History, Step

logger = logging.getLogger("headrace.learner.deltas")


class Deltas:
    """All methods on the event loop. Example: `steps = await deltas.chain(have_version=6, have_layout=layout)`."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._history = History()
        self._wanted = False
        self._making: asyncio.Task[None] | None = None
        self.newest_step: Step | None = None

    def want(self) -> None:
        """From now on a step is made at every publication."""
        self._wanted = True

    def published(self, old: Snapshot | None, new: Snapshot) -> None:
        """Begins to make the step between two versions; never blocks."""
        if self._wanted and old is not None:
            self._begin(old, new)

    async def chain(self, *, have_version: int, have_layout: int) -> tuple[manifest_pb2.Manifest | None, list[Step]]:
        """The newest version's manifest and the steps to it; (None, []) where there is none, so that the answer must be full."""
        newest = self._snapshots.newest
        if not have_version or newest is None or have_version >= newest.version:
            return None, []
        self._wanted = True
        await self.made()
        steps = self._history.chain(have_version=have_version, layout=have_layout, version=newest.version)
        old = self._snapshots.find(have_version)
        if not steps and old is not None:
            self._begin(old, newest)
            await self.made()
            steps = self._history.chain(have_version=have_version, layout=have_layout, version=newest.version)
        return (newest.manifest, steps) if steps else (None, [])

    async def made(self) -> None:
        """Returns once no step is being made."""
        while self._making is not None and not self._making.done():
            await asyncio.wait({self._making})

    def _begin(self, old: Snapshot, new: Snapshot) -> None:
        before = self._making
        self._making = asyncio.create_task(self._make(before, old, new))

    async def _make(self, before: asyncio.Task[None] | None, old: Snapshot, new: Snapshot) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
        try:
            step, layout, total = await asyncio.to_thread(step_between, old, new)
        except (OSError, ValueError) as error:  # a snapshot that was replaced meanwhile, or another layout: whoever asks gets all of it
            logger.info("no delta from version %d to %d: %s", old.version, new.version, error)
            return
        self.newest_step = step
        self._history.add(step, layout=layout, total_bytes=total)


def step_between(old: Snapshot, new: Snapshot) -> tuple[Step, int, int]:
    """(step, layout, bytes of a version). Blocks. Raises FileNotFoundError for a snapshot that is gone, ValueError for another layout."""
    layout = delta.layout_digest(new.manifest)
    if delta.layout_digest(old.manifest) != layout:
        raise ValueError("the versions have other tensors or another plan")
    before, after = _files(old), _files(new)
    parts: list[manifest_pb2.DeltaPart] = []
    for index, bucket in enumerate(new.manifest.buckets):
        span = slice(bucket.file_offset, bucket.file_offset + bucket.num_bytes)
        parts += delta.parts(new.manifest, index, before[bucket.owner][span], after[bucket.owner][span])
    return Step(from_version=old.version, to_version=new.version, parts=parts), layout, sum(bucket.num_bytes for bucket in new.manifest.buckets)


def _files(snapshot: Snapshot) -> dict[int, delta.Bytes]:
    found: dict[int, delta.Bytes] = {}
    for owner in {bucket.owner for bucket in snapshot.manifest.buckets}:
        with (snapshot.folder / f"rank-{owner}.bin").open("rb") as file:
            found[owner] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    return found
