"""RewardService: requests to the plane, answers back as they come. User code never runs here.

    request_iterator ──▶ _read (waits for room) ──▶ plane ──▶ stream.finish ──▶ _answer_all (waits for changed) ──▶ write

Both loops end together: when the caller goes, the handler is cancelled, its reader with it, and the plane forgets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from protos.reward.v1alpha1 import reward_pb2 as pb
from protos.reward.v1alpha1 import reward_pb2_grpc
from reward_server import listing
from reward_server.outcome import Outcome
from reward_server.plane import Plane
from reward_server.scorer import Group, Work
from reward_server.stream import ScoreStream
from reward_server.wire import to_proto

Requests = AsyncIterator[list[pb.ScoreRequest]]
Write = Callable[[list[pb.ScoreResponse]], Awaitable[None]]
Context = grpc.aio.ServicerContext[Any, Any]


_STOPPING = "this reward server is stopping; send what is unanswered to another one, or again later"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves one plane.

    Example: `RewardServicer(plane, max_pending=4096, max_pending_bytes=1 << 28)`
    """

    def __init__(self, plane: Plane, *, max_pending: int, max_pending_bytes: int) -> None:
        self._plane = plane
        self.refused: Callable[[], int] = lambda: 0  # what the server in front has refused
        self._max_pending = max_pending
        self._max_pending_bytes = max_pending_bytes
        self._streams: set[ScoreStream] = set()
        self._num_grouped = 0  # completions of groups that are being scored
        self._group_room = asyncio.Event()
        self._is_draining = False

    @property
    def num_pending(self) -> int:
        """Items read from callers and not answered yet."""
        return sum(stream.num_pending for stream in self._streams) + self._num_grouped

    def drain(self) -> None:
        """Streams read no further, answer what they have read, and end with UNAVAILABLE."""
        self._is_draining = True
        for stream in self._streams:
            stream.changed.set()

    async def Score(self, request_iterator: AsyncIterator[pb.ScoreRequest], context: Context) -> None:
        """See the contract."""

        async def write(responses: list[pb.ScoreResponse]) -> None:
            for response in responses:
                await context.write(response)

        await self._serve(([request] async for request in request_iterator), write, context)

    async def ScoreBatch(self, request_iterator: AsyncIterator[pb.ScoreBatchRequest], context: Context) -> None:
        """See the contract."""

        async def write(responses: list[pb.ScoreResponse]) -> None:
            await context.write(pb.ScoreBatchResponse(responses=responses))

        await self._serve((list(message.requests) async for message in request_iterator), write, context)

    async def ScoreGroup(self, request: pb.ScoreGroupRequest, context: Context) -> pb.ScoreGroupResponse:
        """See the contract."""
        if not request.completions:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a group has no completions; send at least one")
        began_s = time.monotonic()
        name = request.scorer or self._plane.default
        outcomes = await self._group_outcomes(name, request)
        if outcomes is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            raise AssertionError("abort raises")
        return pb.ScoreGroupResponse(rewards=[to_proto(each, name) for each in outcomes], seconds=time.monotonic() - began_s)

    async def ListScorers(self, request: pb.ListScorersRequest, context: Context) -> pb.ListScorersResponse:
        """See the contract."""
        return listing.of(self._plane, num_refused=self.refused())

    async def _group_outcomes(self, name: str, request: pb.ScoreGroupRequest) -> tuple[Outcome, ...] | None:
        """One outcome for each completion; None: the server stops before they are there. The caller's end cancels the work."""
        answered: asyncio.Future[tuple[Outcome, ...]] = asyncio.get_running_loop().create_future()
        group = Group(
            owner=answered,
            prompt=request.prompt,
            completions=tuple(request.completions),
            fields=request.fields.SerializeToString(deterministic=True),
            priority=request.priority,
        )
        while self._num_grouped >= self._max_pending:
            self._group_room.clear()
            await self._group_room.wait()
        if self._is_draining:
            return None
        self._num_grouped += len(group.completions)
        self._plane.submit_group(name, group, lambda outcomes: None if answered.done() else answered.set_result(outcomes))
        try:
            return await answered
        finally:
            self._plane.forget(answered)
            self._num_grouped -= len(group.completions)
            self._group_room.set()

    async def _serve(self, requests: Requests, write: Write, context: Context) -> None:
        stream = ScoreStream(max_items=self._max_pending, max_bytes=self._max_pending_bytes)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            await self._answer_all(stream, reader, write)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            self._plane.forget(stream)
            self._streams.discard(stream)
        if self._is_draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)

    async def _read(self, requests: Requests, stream: ScoreStream) -> None:
        """Until the caller has no more: hands items to the plane as there is room."""
        try:
            async for batch in requests:
                for request in batch:
                    await stream.room()
                    stream.begin(request)
                    self._submit(request, stream)
        finally:
            stream.changed.set()

    def _submit(self, request: pb.ScoreRequest, stream: ScoreStream) -> None:
        name = request.scorer or self._plane.default
        work = Work(
            owner=stream,
            prompt=request.prompt,
            completion=request.completion,
            fields=request.fields.SerializeToString(deterministic=True),
            priority=request.priority,
        )
        self._plane.submit(name, work, partial(stream.finish, request.id, name))

    async def _answer_all(self, stream: ScoreStream, reader: asyncio.Task[None], write: Write) -> None:
        """Sends answers until everything read is answered and no more is read. Raises what the reader raised."""
        while True:
            await stream.changed.wait()
            stream.changed.clear()
            while responses := stream.ready():
                await write(responses)
                stream.sent(responses)
            if self._is_draining:
                reader.cancel()
            if reader.done() and not reader.cancelled():
                reader.result()
            if stream.num_pending == 0 and (reader.done() or self._is_draining):
                return
