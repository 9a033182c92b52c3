"""The trainer's side of the gateway: who is on duty, which batch is due, what is published, which save is a cut.

Every method is one step of a trainer's life, journaled before it answers, and safe to repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

from learner.gateway import cuts, snapshots
from learner.gateway.account import Record
from learner.gateway.attendance import Attendance
from learner.gateway.batches import Batches, Decision
from learner.gateway.books import Books
from learner.gateway.duty import Duty, Post
from learner.gateway.recovery import Recovered, capture
from learner.gateway.refusals import precondition
from learner.gateway.saving import Saving
from learner.gateway.segments import Position
from learner.gateway.snapshots import Snapshot, Snapshots
from learner.gateway.standing import Publication
from learner.gateway.updates import Updates
from protos import faultpoints
from protos.learner.v1alpha1 import learner_pb2
from protos.manifest.v1alpha1 import manifest_pb2

logger = logging.getLogger("headrace.learner.feed")
READ_BYTES = 1 << 20  # of the journal at a time


class Feed:
    """Calls of trainer ranks. `on_close` runs after each publication; `finished` is set once the run is over."""

    def __init__(
        self,
        *,
        books: Books,
        recovered: Recovered,
        attendance: Attendance,
        batches: Batches,
        updates: Updates,
        published: Snapshots,
        saving: Saving,
        checkpoints: Path,
        on_close: Callable[[], None],
    ) -> None:
        self._books = books
        self._standing = recovered.standing
        self._attendance = attendance
        self._batches = batches
        self.updates = updates
        self._snapshots = published
        self._saving = saving
        self._checkpoints = checkpoints
        self._on_close = on_close
        self._closings: set[asyncio.Task[Publication]] = set()
        self.finished = asyncio.Event()
        self.duty = Duty()
        if recovered.standing.post is not None:
            self.duty.begin(recovered.standing.post, assembled=recovered.standing.assembled)
        for announced, position in recovered.captures.values():
            saving.announce(announced, position)
        batches.ask_cut = self.ask_cut

    @property
    def fingerprint(self) -> str:
        """Of the prompts that the run began with; empty before they were rendered."""
        return self._standing.fingerprint

    def note_prompts(self, fingerprint: str) -> None:
        self._commit_own({"type": "prompts", "fingerprint": fingerprint})

    async def restore_snapshots(self) -> None:
        """Serves what was published before a restart, where it is still there."""
        for publication in self._standing.published:
            try:
                manifest = await asyncio.to_thread(snapshots.load, Path(publication.snapshot_dir), publication.policy_step)
            except ValueError as error:
                logger.warning("version %d cannot be fetched until the next one is published: %s", publication.version, error)
            else:
                await self._snapshots.publish(_snapshot(publication, manifest))

    async def register(self, incarnation: int, rank: int, world_size: int) -> Post:
        """Blocks until all ranks of the incarnation have registered."""
        if self.duty.admit(incarnation, rank, world_size):
            async with self._saving.lock:
                if self.duty.admit(incarnation, rank, world_size):
                    self._relieve(incarnation, world_size)
        if self.duty.report(rank):
            await asyncio.shield(self._commit_own({"type": "assembled"}))
            faultpoints.point("after_rollback_before_answer")
            self.duty.assemble()
        return await self.duty.wait(incarnation)

    async def take(self, incarnation: int, rank: int, policy_step: int, *, leaving: bool = False) -> Decision:
        """Blocks until the batch is decided."""
        self.duty.check(incarnation, rank)
        try:
            return await self._batches.take(policy_step, num_ranks=self.duty.world_size, leaving=leaving)
        except asyncio.CancelledError:
            self.duty.check(incarnation, rank)  # relieved meanwhile: say so
            raise

    def read_rows(self, keys: list[tuple[str, int]], chunk_bytes: int) -> AsyncGenerator[list[bytes | memoryview], None]:
        """Payloads of samples in order, about chunk_bytes at a time (0: READ_BYTES); read in a thread, one chunk ahead of the caller,
        from this call on."""
        payloads = self._books.read(keys, chunk_bytes or READ_BYTES)
        return self._chunks(payloads, asyncio.ensure_future(asyncio.to_thread(next, payloads, None)))

    async def _chunks(self, payloads: Iterator[list[bytes | memoryview]], ahead: asyncio.Future[Any]) -> AsyncGenerator[list[bytes | memoryview], None]:
        try:
            while (chunk := await ahead) is not None:
                ahead = asyncio.ensure_future(asyncio.to_thread(next, payloads, None))
                yield chunk
        finally:
            ahead.cancel()

    async def close(self, incarnation: int, policy_step: int, *, snapshot_dir: Path, will_save: bool, mismatch: float | None = None) -> Publication:
        """Closes the step before and publishes the policy of this one; to the end also when the caller leaves, since it asks again."""
        closing = asyncio.create_task(self._close(incarnation, policy_step, snapshot_dir, will_save, mismatch))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
        return await asyncio.shield(closing)

    async def _close(self, incarnation: int, policy_step: int, snapshot_dir: Path, will_save: bool, mismatch: float | None) -> Publication:
        self._check_close(incarnation, policy_step)
        manifest = await asyncio.to_thread(snapshots.load, snapshot_dir, policy_step)
        self._check_close(incarnation, policy_step)
        faultpoints.point("before_close")
        version, record = self._books.ledger.publish(policy_step, mismatch=mismatch)
        publication = Publication(version=version.number, lineage=version.lineage, policy_step=policy_step, snapshot_dir=str(snapshot_dir))
        if record is not None:
            record |= {"lineage": version.lineage, "snapshot_dir": str(snapshot_dir), "will_save": will_save}
            self._standing = self._standing.apply(record)
            announced = capture(self._books.ledger, self._standing, self._books.evaluations) if will_save else None
            position = await asyncio.shield(self._books.commit(record))
            if announced is not None and self.duty.incarnation == incarnation:
                self._saving.announce(announced, position)
            self._batches.forget(before=policy_step)
        await asyncio.shield(self._books.barrier())
        faultpoints.point("after_close_before_answer")
        await self._snapshots.publish(_snapshot(publication, manifest))
        self._attendance.broadcast(learner_pb2.AttendResponse(published=learner_pb2.Published(version=publication.version)))
        self._on_close()
        logger.info("step %d is published as version %d", policy_step, publication.version)
        return publication

    async def save(self, incarnation: int, policy_step: int, *, source: Path, error: str) -> Path | None:
        """Makes a finished save the cut; with an error, forgets that one was announced."""
        self.duty.check(incarnation)
        try:
            if error:
                self._saving.fail(policy_step, error)
                return None
            return await self._saving.finish(policy_step, source)
        finally:
            self._batches.saved(policy_step)

    async def ask_cut(self) -> None:
        """Announces a cut of the newest policy as it is now; the trainer is told by TakeBatch."""
        incarnation, captured = self.duty.incarnation, capture(self._books.ledger, self._standing, self._books.evaluations, asked=True)
        position = await asyncio.shield(self._commit_own({"type": "cut_asked", "step": captured.policy_step}))
        if self.duty.incarnation == incarnation:
            self._saving.announce(captured, position)

    def finish(self, incarnation: int, error: str) -> None:
        """The run is over: replicas are told."""
        self.duty.check(incarnation)
        reason = error or "the run is finished"
        if not self.finished.is_set():
            (logger.error if error else logger.info)("the run is over: %s", reason)
            self._attendance.broadcast(learner_pb2.AttendResponse(run_finished=learner_pb2.RunFinished(reason=reason)))
            self.finished.set()

    def _relieve(self, incarnation: int, world_size: int) -> None:
        """A new incarnation comes on duty: back to the newest cut."""
        cut = cuts.newest(self._checkpoints)
        step = cut.policy_step if cut else 0
        rollback = self._books.ledger.rollback(step)
        if rollback is not None:
            logger.warning("rolled back to step %d (%s)", step, cut.folder if cut else "the base weights")
            self._books.commit(rollback)
        post = Post(incarnation=incarnation, world_size=world_size, cut_dir=str(cut.folder) if cut else "", policy_step=step, lineage=self._books.ledger.lineage)
        self._commit_own(post.to_record())
        self._saving.clear()
        self.updates.abandon()
        self.duty.begin(post)
        self._batches.forget()

    def _check_close(self, incarnation: int, policy_step: int) -> None:
        self.duty.check(incarnation)
        account = self._books.ledger.account
        again = account.published and policy_step == account.step
        first = not account.published and policy_step == account.step
        closes = account.active is not None and policy_step == account.step + 1
        if not (again or first or closes):
            raise precondition(f"policy {policy_step} cannot be published: the account is at step {account.step} with {'a' if account.active else 'no'} batch in training; take the batch first, or register again")

    def _commit_own(self, record: Record) -> asyncio.Future[Position]:
        self._standing = self._standing.apply(record)
        return self._books.commit(record)


def _snapshot(publication: Publication, manifest: manifest_pb2.Manifest) -> Snapshot:
    """The published form of a manifest: with version and lineage filled in."""
    filled = manifest_pb2.Manifest()
    filled.CopyFrom(manifest)
    filled.version, filled.lineage, filled.policy_step = publication.version, publication.lineage, publication.policy_step
    return Snapshot(version=publication.version, folder=Path(publication.snapshot_dir), manifest=filled)
