"""Takes finished samples: check, account, journal, receipt. Many are in flight on one fdatasync.

    _take_all   consumes the caller's stream, produces (receipts, future), waits for the journal's backlog and for a bounded queue
    serve       consumes that queue, produces receipts in order of submission, waits for each future
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from learner.gateway.books import Books
from learner.gateway.catalog import Shelf
from learner.gateway.evaluation import parsed
from learner.gateway.evaluation_desk import EvaluationDesk
from learner.gateway.trajectories import facts_of
from protos import faultpoints
from protos.trajectory.v1alpha1 import trajectory_pb2

logger = logging.getLogger("headrace.learner.submissions")
MAX_IN_FLIGHT = 256  # messages of one caller without receipt


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What became of one sample. Example: Receipt(group_id="g00000003", sample_index=1, status="accepted")"""

    group_id: str
    sample_index: int
    status: str  # accepted, duplicate, unwanted
    detail: str = ""


Sample = trajectory_pb2.Trajectory
Item = tuple[list[Receipt], "asyncio.Future[Any]"] | BaseException | None  # the future: the newest record of a message is on the disk


class Submissions:
    """One intake for all callers. vocabulary: number of token ids of the model."""

    def __init__(self, books: Books, shelf: Shelf, *, run_id: str, vocabulary: int, evaluation: EvaluationDesk | None = None) -> None:
        self._evaluation = evaluation
        self._books = books
        self._shelf = shelf
        self._run_id = run_id
        self._vocabulary = vocabulary

    async def serve(self, messages: AsyncIterator[tuple[str, Sequence[Sample]]], write: Callable[[list[Receipt]], Awaitable[None]]) -> None:
        """One caller's stream of (run_id, samples of one message); a message's receipts are written together.

        Raises ValueError for a malformed sample, after the receipts of those before it.
        """
        queue: asyncio.Queue[Item] = asyncio.Queue(MAX_IN_FLIGHT)
        taker = asyncio.create_task(self._take_all(messages, queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                receipts, durable = item
                await asyncio.shield(durable)
                faultpoints.point("after_fsync_before_receipt")
                await write(receipts)
                faultpoints.point("after_receipt")
        finally:
            taker.cancel()

    async def _take_all(self, messages: AsyncIterator[tuple[str, Sequence[Sample]]], queue: asyncio.Queue[Item]) -> None:
        try:
            async for run_id, samples in messages:
                await self._books.journal.drained()
                receipts: list[Receipt] = []
                try:
                    for sample in samples:
                        receipts.append(await self._take(run_id, sample))
                finally:
                    if receipts:
                        await queue.put((receipts, self._books.barrier()))
            await queue.put(None)
        except Exception as error:  # handed to `serve`, which raises it in its place among the receipts
            await queue.put(error)

    async def _take(self, run_id: str, trajectory: Sample) -> Receipt:
        """Accounts one sample; its record is queued for the disk. Raises ValueError when it is malformed."""
        if run_id != self._run_id:
            raise ValueError(f"sample ({trajectory.group_id}, {trajectory.sample_index}) belongs to run {run_id or 'empty'}, this is {self._run_id}; attend again")
        if self._evaluation is not None and parsed(trajectory.group_id) is not None:
            status, detail = await self._evaluation.take(trajectory)
            return Receipt(group_id=trajectory.group_id, sample_index=trajectory.sample_index, status=status, detail=detail)
        ledger, key = self._books.ledger, (trajectory.group_id, trajectory.sample_index)
        group = ledger.group(trajectory.group_id)
        catalog = await self._shelf.wait() if group is not None else None
        prompt_ids, max_new_tokens = (catalog.ids[group.prompt_row], catalog.max_new_tokens[group.prompt_row]) if catalog and group else (None, None)
        facts = facts_of(trajectory, prompt_ids=prompt_ids, vocabulary=self._vocabulary, max_new_tokens=max_new_tokens)
        outcome = ledger.submit(*key, facts)
        receipt = Receipt(group_id=key[0], sample_index=key[1], status=outcome.status, detail=outcome.reason if outcome.status == "unwanted" else "")
        if outcome.record is not None:
            if outcome.reason:
                logger.info("group %s is dropped: %s", key[0], outcome.reason)
            self._books.commit_sample(key, outcome.record, trajectory.SerializeToString())
        return receipt
