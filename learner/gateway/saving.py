"""Turns a finished save into a cut, one at a time, and lets the journal forget what no cut needs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc

from learner.gateway import cuts
from learner.gateway.books import Books
from learner.gateway.recovery import Capture
from learner.gateway.refusals import Refused, precondition
from learner.gateway.segments import Position

logger = logging.getLogger("headrace.learner.saving")


class Saving:
    """Captures wait here from the publication that announced a save until the save is finished or has failed.

    lock: held while a cut is being written, so that no rollback picks the cut before it. num_failed: saves that did not become cuts.
    """

    def __init__(self, books: Books, checkpoints: Path, *, keep: int) -> None:
        self._books = books
        self._checkpoints = checkpoints
        self._keep = keep
        self._captures: dict[int, tuple[Capture, Position]] = {}
        self.lock = asyncio.Lock()
        self.num_failed = 0

    def announce(self, capture: Capture, position: Position) -> None:
        """position: of the publication's record."""
        self._captures[capture.policy_step] = (capture, position)

    def clear(self) -> None:
        """A new trainer incarnation will not finish the saves of the older one."""
        self._captures.clear()

    def fail(self, policy_step: int, error: str) -> None:
        """The save failed in the trainer: nothing is kept for it."""
        self._captures.pop(policy_step, None)
        self.num_failed += 1
        logger.error("the save of step %d failed (%d so far): %s", policy_step, self.num_failed, error)

    async def finish(self, policy_step: int, source: Path) -> Path:
        """Where the marked cut lies. Raises Refused FAILED_PRECONDITION for a step without a capture, INTERNAL when the disk fails."""
        async with self.lock:
            folder = cuts.folder_of(self._checkpoints, policy_step)
            if await asyncio.to_thread(cuts.marked, folder) is not None:
                self._captures.pop(policy_step, None)
                return folder
            if policy_step not in self._captures:
                raise precondition(f"step {policy_step} was not closed with will_save by the trainer on duty; announce a save in CloseBatch")
            capture, position = self._captures[policy_step]
            cut = cuts.Cut(folder=folder, policy_step=policy_step, lineage=capture.lineage, segment=position.segment, offset=position.offset)
            try:
                await asyncio.to_thread(cuts.write, source, cut, capture.state)
            except OSError as error:
                self.fail(policy_step, str(error))
                raise Refused(grpc.StatusCode.INTERNAL, f"the save of step {policy_step} could not be made a cut: {error}; make room or repair the disk") from error
            del self._captures[policy_step]
            await self._forget()
            logger.info("cut of step %d lies in %s", policy_step, folder)
            return folder

    async def _forget(self) -> None:
        """Retention; then the account and the journal let go of what is older than the oldest kept cut and not open any more."""
        oldest = await asyncio.to_thread(cuts.retain, self._checkpoints, self._keep)
        record = self._books.ledger.cover(oldest.policy_step)
        if record is not None:
            await asyncio.shield(self._books.commit(record))
        self._books.forget_payloads()
        before = min([oldest.position, *self._books.payloads.values()])
        await asyncio.to_thread(self._books.journal.forget, before)
