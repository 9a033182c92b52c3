"""Takes finished samples: check, account, journal, receipt. Many are in flight on one fdatasync.

    _take    consumes the caller's stream, produces (receipt, future), waits for the journal's backlog and for a bounded queue
    serve    consumes that queue, produces receipts in order of submission, waits for each future
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from learner.gateway.books import Books
from learner.gateway.catalog import Shelf
from learner.gateway.trajectories import facts_of
from protos import faultpoints
from protos.trajectory.v1alpha1 import trajectory_pb2

logger = logging.getLogger("headrace.learner.submissions")
MAX_IN_FLIGHT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What became of one sample. Example: Receipt(group_id="g00000003", sample_index=1, status="accepted")"""

    group_id: str
    sample_index: int
    status: str  # accepted, duplicate, unwanted
    detail: str = ""


Item = tuple[Receipt, "asyncio.Future[Any]"] | BaseException | None


class Submissions:
    """One intake for all callers. vocabulary: number of token ids of the model."""

    def __init__(self, books: Books, shelf: Shelf, *, run_id: str, vocabulary: int) -> None:
        self._books = books
        self._shelf = shelf
        self._run_id = run_id
        self._vocabulary = vocabulary

    async def serve(self, samples: AsyncIterator[tuple[str, trajectory_pb2.Trajectory]], write: Callable[[Receipt], Awaitable[None]]) -> None:
        """One caller's stream of (run_id, trajectory). Raises ValueError for a malformed one, after the receipts of those before it."""
        queue: asyncio.Queue[Item] = asyncio.Queue(MAX_IN_FLIGHT)
        taker = asyncio.create_task(self._take_all(samples, queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                receipt, durable = item
                await asyncio.shield(durable)
                faultpoints.point("after_fsync_before_receipt")
                await write(receipt)
                faultpoints.point("after_receipt")
        finally:
            taker.cancel()

    async def _take_all(self, samples: AsyncIterator[tuple[str, trajectory_pb2.Trajectory]], queue: asyncio.Queue[Item]) -> None:
        try:
            async for run_id, trajectory in samples:
                await self._books.journal.drained()
                await queue.put(await self._take(run_id, trajectory))
            await queue.put(None)
        except Exception as error:  # handed to `serve`, which raises it in its place among the receipts
            await queue.put(error)

    async def _take(self, run_id: str, trajectory: trajectory_pb2.Trajectory) -> tuple[Receipt, asyncio.Future[Any]]:
        """Accounts one sample. Raises ValueError when it is malformed."""
        if run_id != self._run_id:
            raise ValueError(f"sample ({trajectory.group_id}, {trajectory.sample_index}) belongs to run {run_id or 'empty'}, this is {self._run_id}; attend again")
        ledger, key = self._books.ledger, (trajectory.group_id, trajectory.sample_index)
        group = ledger.group(trajectory.group_id)
        catalog = await self._shelf.wait() if group is not None else None
        prompt_ids, max_new_tokens = (catalog.ids[group.prompt_row], catalog.max_new_tokens[group.prompt_row]) if catalog and group else (None, None)
        facts = facts_of(trajectory, prompt_ids=prompt_ids, vocabulary=self._vocabulary, max_new_tokens=max_new_tokens)
        outcome = ledger.submit(*key, facts)
        receipt = Receipt(group_id=key[0], sample_index=key[1], status=outcome.status, detail=outcome.reason if outcome.status == "unwanted" else "")
        if outcome.record is None:
            return receipt, self._books.barrier()
        if outcome.reason:
            logger.info("group %s is dropped: %s", key[0], outcome.reason)
        return receipt, self._books.commit_sample(key, outcome.record, trajectory.SerializeToString())
