"""One call of Score: which of its items are pending, and the answers that wait to be sent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from protos.reward.v1alpha1 import reward_pb2 as pb
from reward_server.outcome import Outcome
from reward_server.wire import to_proto

MAX_ANSWERS = 256  # in one message

@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    began_s: float
    num_bytes: int


class ScoreStream:
    """Bounded: `room` waits while too much is pending. An item is pending until its answer has been sent.

    Reader: waits for room, then `begin`. Plane: `finish`. Writer: waits for `changed`, sends `ready()`, then `sent`.
    """

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self.changed = asyncio.Event()  # an answer is ready, or the reader has ended
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._pending: dict[str, _Pending] = {}
        self._num_bytes = 0
        self._answers: list[pb.ScoreResponse] = []
        self._room = asyncio.Event()

    @property
    def num_pending(self) -> int:
        """Items read whose answer has not been sent."""
        return len(self._pending)

    async def room(self) -> None:
        """Returns once another item may be read."""
        while len(self._pending) >= self._max_items or self._num_bytes >= self._max_bytes:
            self._room.clear()
            await self._room.wait()

    def begin(self, request: pb.ScoreRequest) -> None:
        """Raises ValueError for an item without an id, or with one that is pending."""
        if not request.id:
            raise ValueError("an item has no id; give each its own, answers are matched by it")
        if request.id in self._pending:
            raise ValueError(f"item id {request.id!r} is pending already; ids must be unique in a stream")
        num_bytes = len(request.prompt) + len(request.completion)
        self._pending[request.id] = _Pending(began_s=time.monotonic(), num_bytes=num_bytes)
        self._num_bytes += num_bytes

    def finish(self, item_id: str, scorer: str, outcome: Outcome) -> None:
        """Queues an answer for sending."""
        seconds = time.monotonic() - self._pending[item_id].began_s
        self._answers.append(pb.ScoreResponse(id=item_id, seconds=seconds, reward=to_proto(outcome, scorer)))
        self.changed.set()

    def ready(self) -> list[pb.ScoreResponse]:
        """Takes the answers of one message, oldest first; empty: none."""
        taken, self._answers = self._answers[:MAX_ANSWERS], self._answers[MAX_ANSWERS:]
        return taken

    def sent(self, responses: list[pb.ScoreResponse]) -> None:
        """Makes room for as many."""
        for response in responses:
            self._num_bytes -= self._pending.pop(response.id).num_bytes
        self._room.set()
