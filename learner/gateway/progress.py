"""Takes reports of unfinished samples: check, account, journal, answer. One caller's reports are answered in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from learner.gateway.books import Books
from learner.gateway.parts import Finish, Part
from learner.gateway.terms import Reported
from protos.arrays import unpack
from protos.learner.v1alpha1 import learner_pb2 as pb
from protos.trajectory.v1alpha1 import trajectory_pb2

_FINISH: dict[trajectory_pb2.FinishReason, Finish] = {
    trajectory_pb2.FINISH_REASON_UNSPECIFIED: "",
    trajectory_pb2.FINISH_REASON_STOP: "stop",
    trajectory_pb2.FINISH_REASON_LENGTH: "length",
}
FINISHES: dict[Finish, trajectory_pb2.FinishReason] = {word: reason for reason, word in _FINISH.items()}
_STATUSES = {
    "accepted": pb.PROGRESS_STATUS_ACCEPTED,
    "elsewhere": pb.PROGRESS_STATUS_ELSEWHERE,
    "foreign": pb.PROGRESS_STATUS_FOREIGN,
    "unwanted": pb.PROGRESS_STATUS_UNWANTED,
    "full": pb.PROGRESS_STATUS_FULL,
}


MAX_IN_FLIGHT = 256  # reports of one caller that are accounted and not answered
Item = tuple[pb.ReportProgressResponse, "asyncio.Future[Any]"] | BaseException | None  # the future: the report is on the disk


class Progress:
    """One intake for all callers. vocabulary: number of token ids of the model."""

    def __init__(self, books: Books, *, run_id: str, vocabulary: int) -> None:
        self._books = books
        self._run_id = run_id
        self._vocabulary = vocabulary

    async def serve(self, requests: AsyncIterator[pb.ReportProgressRequest], write: Callable[[pb.ReportProgressResponse], Awaitable[None]]) -> None:
        """One caller's stream. Raises ValueError for a malformed report."""
        queue: asyncio.Queue[Item] = asyncio.Queue(MAX_IN_FLIGHT)
        taker = asyncio.create_task(self._take_all(requests, queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                response, durable = item
                await asyncio.shield(durable)  # those that came meanwhile are synced together
                await write(response)
        finally:
            taker.cancel()

    async def _take_all(self, requests: AsyncIterator[pb.ReportProgressRequest], queue: asyncio.Queue[Item]) -> None:
        try:
            async for request in requests:
                await self._books.journal.drained()
                outcome = self.take(request)
                response = pb.ReportProgressResponse(group_id=request.group_id, sample_index=request.part.sample_index, status=_STATUSES[outcome.status], num_tokens=outcome.num_tokens)
                await queue.put((response, self._books.barrier()))
            await queue.put(None)
        except Exception as error:  # handed to `serve`, which raises it in its place among the answers
            await queue.put(error)

    def take(self, request: pb.ReportProgressRequest) -> Reported:
        """Accounts one report and queues its record."""
        name = f"progress of sample ({request.group_id}, {request.part.sample_index})"
        if request.run_id != self._run_id:
            raise ValueError(f"{name} belongs to run {request.run_id or 'empty'}, this is {self._run_id}; attend again")
        try:
            part = _part_of(request.part, self._vocabulary)
            outcome = self._books.ledger.report(request.group_id, request.part.sample_index, lease_id=request.lease_id, part=part, digest_before=request.digest_before)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if outcome.record is not None:
            self._books.commit(outcome.record)
            self._books.progress["reports"] += 1
        return outcome


def _part_of(message: pb.PartialSample, vocabulary: int) -> Part:
    """Raises ValueError for a message that is not well formed."""
    ids, logprobs = unpack(message.token_ids), unpack(message.logprobs)
    if ids.dtype != np.dtype("<i4") or logprobs.dtype != np.dtype("<f4"):
        raise ValueError("token_ids must be int32 and logprobs float32")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"token_ids must lie in [0, {vocabulary}), got {ids.min()} to {ids.max()}")
    if message.finish_reason not in _FINISH:
        raise ValueError(f"finish_reason {message.finish_reason} is none that a reported sample can have: unspecified, stop or length")
    reached, spans = 0, []
    for span in message.spans:
        if span.start != reached:
            raise ValueError(f"a span begins at {span.start} after {reached}: spans must follow each other")
        spans.append((span.version, span.end - span.start))
        reached = span.end
    return Part(start=message.start, ids=message.token_ids.data, logprobs=message.logprobs.data, spans=tuple(spans), finish=_FINISH[message.finish_reason])
