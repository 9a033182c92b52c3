"""Publishes versions on a shared path in the background, the newest alone where several wait.

    share: consumes snapshots (a place for one), produces version folders; waits for the shared path, in a thread; unblocked by stop
"""

from __future__ import annotations

import asyncio
import logging

from learner.gateway.bell import Bell
from learner.gateway.deltas import Deltas
from learner.gateway.snapshots import Snapshot
from protos.weights import folder
from protos.weights.folder import Place

logger = logging.getLogger("headrace.learner.sharing")


class Sharing:
    """Example: `sharing = Sharing(Place("/mnt/shared/run"), deltas)`; `run` is a task for as long as the gateway lives."""

    def __init__(self, place: Place, deltas: Deltas) -> None:
        self._place = place
        self._deltas = deltas
        self._next: Snapshot | None = None
        self._bell = Bell()
        self.num_published = 0
        self.num_failed = 0  # versions that could not be written; the next one is
        deltas.want()

    def offer(self, snapshot: Snapshot) -> None:
        """Never blocks."""
        self._next = snapshot
        self._bell.ring()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._next is None:
                await self._bell.wait()
                continue
            snapshot, self._next = self._next, None
            await self._deltas.made()
            try:
                await asyncio.to_thread(folder.publish, self._place, snapshot.folder, snapshot.manifest, step=self._deltas.newest_step)
            except Exception as error:  # supervised edge: a file system raises what it likes; the run goes on, the next version is tried
                self.num_failed += 1
                logger.warning("version %d was not published on the shared path: %s: %s", snapshot.version, type(error).__name__, error)
            else:
                self.num_published += 1
