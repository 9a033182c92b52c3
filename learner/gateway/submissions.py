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

from learner.gateway.account import Record
from learner.gateway.appends import Key
from learner.gateway.books import Books
from learner.gateway.catalog import Shelf
from learner.gateway.evaluation import parsed
from learner.gateway.evaluation_desk import EvaluationDesk
from learner.gateway.groups import ENVIRONMENT, UNSCORED
from learner.gateway.trajectories import facts_of, with_fallback
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
    group_is_over: bool = False  # nothing more is wanted of its group


Sample = trajectory_pb2.Trajectory
Taken = tuple[Key, Record, bytes]
Item = tuple[list[Receipt], "asyncio.Future[Any]"] | BaseException | None  # the future: the newest record of a message is on the disk


class Submissions:
    """One intake for all callers. vocabulary: number of token ids of the model."""

    def __init__(self, books: Books, shelf: Shelf, *, run_id: str, vocabulary: int, fallback: float | None = None, evaluation: EvaluationDesk | None = None) -> None:
        self._evaluation = evaluation
        self._books = books
        self._shelf = shelf
        self._run_id = run_id
        self._vocabulary = vocabulary
        self._fallback = fallback  # reward of unscored samples; None: they have none

    async def serve(self, messages: AsyncIterator[tuple[str, Sequence[Sample]]], write: Callable[[list[Receipt]], Awaitable[None]]) -> None:
        """One caller's stream of (run_id, samples of one message); a message's receipts are written together.

        Raises ValueError for a malformed sample, after the receipts of those before it.
        """
        queue: asyncio.Queue[Item] = asyncio.Queue(MAX_IN_FLIGHT)
        taker = asyncio.create_task(self._take_all(messages, queue))
        held: list[Item] = []  # out of the queue, not answered yet
        try:
            while (item := held.pop() if held else await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                receipts, durable = item
                await asyncio.shield(durable)
                faultpoints.point("after_fsync_before_receipt")
                while not queue.empty() and not held:  # one answer for all messages of several samples that are on the disk by now
                    following = queue.get_nowait()
                    if isinstance(following, tuple) and min(len(receipts), len(following[0])) > 1 and _is_durable(following[1]):
                        receipts += following[0]
                    else:
                        held.append(following)
                await write(receipts)
                faultpoints.point("after_receipt")
        finally:
            taker.cancel()

    async def _take_all(self, messages: AsyncIterator[tuple[str, Sequence[Sample]]], queue: asyncio.Queue[Item]) -> None:
        try:
            async for run_id, samples in messages:
                await self._books.journal.drained()
                await self._until_prompts_are_known(samples)
                receipts: list[Receipt] = []
                taken: list[Taken] = []
                try:
                    for sample in samples:
                        receipts.append(self._take(run_id, sample, taken))
                finally:
                    if receipts:
                        await queue.put((receipts, self._books.commit_samples(taken)))
            await queue.put(None)
        except Exception as error:  # handed to `serve`, which raises it in its place among the receipts
            await queue.put(error)

    async def _until_prompts_are_known(self, samples: Sequence[Sample]) -> None:
        """Samples of groups that the account knows are compared with their prompts; after a restart those are rendered first."""
        if self._shelf.catalog is None and any(self._books.ledger.group(sample.group_id) for sample in samples):
            await self._shelf.wait()
        if self._evaluation is not None and any(parsed(sample.group_id) for sample in samples):
            await self._evaluation.until_prompts_are_known()

    def _take(self, run_id: str, trajectory: Sample, taken: list[Taken]) -> Receipt:
        """Accounts one sample; what must be journaled goes into `taken`. No await between that and `commit_samples`: the journal has
        the order of the account. Raises ValueError when the sample is malformed."""
        group_id, index = trajectory.group_id, trajectory.sample_index
        if run_id != self._run_id:
            raise ValueError(f"sample ({group_id}, {index}) belongs to run {run_id or 'empty'}, this is {self._run_id}; attend again")
        if self._evaluation is not None and parsed(group_id) is not None:
            status, detail = self._evaluation.take(trajectory)
            return Receipt(group_id=group_id, sample_index=index, status=status, detail=detail)
        ledger, catalog = self._books.ledger, self._shelf.catalog
        group = ledger.group(group_id)
        prompt_ids, max_new_tokens = (catalog.ids[group.prompt_row], catalog.max_new_tokens[group.prompt_row]) if catalog and group else (None, None)
        fell_back = with_fallback(trajectory, self._fallback) if self._fallback is not None else ""
        facts = facts_of(trajectory, prompt_ids=prompt_ids, vocabulary=self._vocabulary, max_new_tokens=max_new_tokens)
        outcome = ledger.submit(group_id, index, facts)
        if outcome.record is not None:
            reason = facts.unusable_reason or (f"{fell_back}_fallback" if fell_back else "")
            if reason:
                self._books.unusable[reason] += 1
            self._books.unscored.note(reason if reason.startswith((UNSCORED, ENVIRONMENT)) else "")
            if outcome.reason:
                logger.info("group %s is dropped: %s", group_id, outcome.reason)
            if group is not None and outcome.group != "open" and (missing := group.num_drawn - len(group.samples)):
                self._books.stopped[outcome.reason or "oversampled"] += missing
            taken.append(((group_id, index), outcome.record, trajectory.SerializeToString()))
        return Receipt(group_id=group_id, sample_index=index, status=outcome.status, detail=outcome.reason if outcome.status == "unwanted" else "", group_is_over=outcome.group != "open")


def _is_durable(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
