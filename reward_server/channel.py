"""What the service and a scorer process say to each other: msgpack over one socket pair.

Service to process: first `[SCHEMA, memory_bytes, [[name, use, args, limit_s], ...]]`, then batches
`[scorer_index, [[seq, prompt, completion, fields], ...]]` with fields a serialized Struct. While a batch is unanswered
`[CANCEL, [seq, ...]]` may follow for calls that need not be made (each is still answered), and, where the scorer is
async, further batches of it.
Process to service: first `[SCHEMA, True, [[description, is_async, version, is_deterministic], ...]]` or `[SCHEMA, False, what is wrong]`, then `[seq, None, value, parts]` or `[seq, reason, detail]` a call (of a whole group, whose completion is a list: `[seq, [[None, value, parts], [reason, detail], ...]]`), and `[]` as a sign of life of an event loop.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any, get_args

import msgpack

from reward_server.outcome import Answered, Outcome, Reason, Scored, Unscored

SCHEMA = 1
CANCEL = -1
MAX_ANSWER_BYTES = 16 << 20  # of all answers that wait in one read; an answer itself is far smaller
_READ_BYTES = 1 << 18


def encode(message: list[Any]) -> bytes:
    """Bytes of one message."""
    data: bytes = msgpack.packb(message)
    return data


def answer(seq: int, answered: Answered) -> list[Any]:
    """The message that answers one call."""
    return [seq, [_said(each) for each in answered]] if isinstance(answered, tuple) else [seq, *_said(answered)]


def _said(outcome: Outcome) -> list[Any]:
    return [None, outcome.value, dict(outcome.parts)] if isinstance(outcome, Scored) else [outcome.reason, outcome.detail]


def outcome_of(message: list[Any]) -> Answered:
    """The outcome in an answer, or those of a group. Raises ValueError, TypeError or LookupError for what is none."""
    seq, *said = message
    if not isinstance(seq, int):
        raise TypeError(f"an answer begins with its number, not with {seq!r:.100}")
    return tuple(map(_outcome, said[0])) if isinstance(said[0], list) else _outcome(said)


def _outcome(message: list[Any]) -> Outcome:
    reason, said, *parts = message
    if reason is None:
        return Scored(value=float(said), parts={str(name): float(part) for name, part in parts[0].items()})
    if reason not in get_args(Reason):
        raise ValueError(f"unknown reason {reason!r:.100}")
    return Unscored(str(said), reason)


def answers() -> msgpack.Unpacker:
    """A decoder of the service's side: feed it bytes, iterate over whole messages."""
    return msgpack.Unpacker(max_buffer_size=MAX_ANSWER_BYTES)


class Inbox:
    """The process's side: messages of the service as they come."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.waiting: deque[list[Any]] = deque()
        self._unpacker = msgpack.Unpacker(max_buffer_size=0)  # a prompt may be as large as a gRPC message may be

    def read(self) -> None:
        """Adds to `waiting` what one read completes, maybe nothing; blocks until there are bytes. Raises EOFError when the service is gone."""
        data = self.connection.recv(_READ_BYTES)
        if not data:
            raise EOFError("the service is gone")
        self._unpacker.feed(data)
        self.waiting.extend(self._unpacker)

    def read_if_any(self) -> None:
        """As `read`, without blocking."""
        if select.select([self.connection], [], [], 0)[0]:
            self.read()

    def all(self) -> Iterator[list[Any]]:
        """Messages, blocking, until the service is gone."""
        try:
            while True:
                while self.waiting:
                    yield self.waiting.popleft()
                self.read()
        except EOFError:
            return
