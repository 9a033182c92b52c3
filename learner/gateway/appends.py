"""What both journals share: appends in order of calls, made durable in batches by one thread, and answered only then.

    append() ─▶ queue ─▶ one writer thread: `_write` of the backend ─▶ the futures of the whole batch

    loop:   the writer task consumes the queue, produces resolved futures, waits for the thread, is unblocked by append()
    thread: consumes one batch at a time; while it writes, the next batch gathers, so many waiters share one sync
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
from isal.isal_zlib import crc32

from learner.gateway.groups import group_id
from learner.gateway.segments import Entry, Position

Key = tuple[str, int]  # (group_id, sample_index): the identity of a sample in its run
Item = tuple[bytes, bytes, int, "Key | None"]  # record, payload, the payload's CRC-32, whose payload
_Waiter = tuple["asyncio.Future[Any]", int, int, bool]  # done when durable, of so many entries, of so many bytes, with a list or one position
PAYLOADS = frozenset({"submitted", "payload"})  # records that carry a sample's payload


class JournalLocked(ValueError):
    """Another process has the journal open."""


class JournalFailed(RuntimeError):
    """An append did not become durable; the journal takes nothing more until it is opened again."""


def key_of(record: dict[str, Any]) -> Key | None:
    """Whose payload a record carries; None: nobody's."""
    return (group_id(record["seq"]), record["sample_index"]) if record.get("type") in PAYLOADS else None


class Appends(ABC):
    """One opened journal. Read it to its end first, then append. max_pending_bytes: see `drained`."""

    def __init__(self, *, max_pending_bytes: int) -> None:
        self.num_bytes = 0  # about what the journal takes; counted, nobody is asked
        self.num_syncs = 0  # batches made durable
        self.sync_s = 0.0  # waited for the disk, or for Redis, to make them so
        self._max_pending_bytes = max_pending_bytes
        self._queue: list[Item] = []
        self._waiters: list[_Waiter] = []  # of the queue, in order
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._failure: JournalFailed | None = None
        self._writer: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    # What a backend does; all of it blocks on a disk or a network.

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in messages: a folder, or an address and a key."""

    @abstractmethod
    def read(self, after: Position | None = None) -> Iterator[Entry]:
        """Entries, oldest first, all or those after a position; then the journal is ready for appends. Raises JournalDamaged."""

    @abstractmethod
    def has(self, position: Position) -> bool:
        """Whether a whole entry begins there; before any append."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether there is no entry at all."""

    @abstractmethod
    def begin_after(self, position: Position) -> None:
        """Of an empty journal, before it is read: its first entry will compare greater than a position of a journal that is gone."""

    @abstractmethod
    def find(self, keys: Iterable[Key]) -> dict[Key, Position]:
        """Where the payloads of samples lie, as far as they are in the journal; once it was read."""

    @abstractmethod
    def payload(self, position: Position) -> bytes:
        """The payload of the entry at a position. Raises JournalDamaged when there is no whole entry."""

    def payloads(self, positions: Sequence[Position]) -> Iterator[bytes | memoryview]:
        """As `payload`, of several in their order."""
        for position in positions:
            yield self.payload(position)

    @abstractmethod
    def forget(self, before: Position) -> int:
        """Lets go of entries before a position, as far as that is cheap; how many parts (segments, entries) went."""

    @abstractmethod
    def bytes_since(self, position: Position | None) -> int:
        """About how many bytes follow a position; None: all."""

    @abstractmethod
    def _write(self, batch: list[Item]) -> list[Position]:
        """In the thread: one batch, durable when it returns. Raises JournalFailed, and then nothing of the batch counts."""

    def _chore(self) -> Callable[[], None] | None:
        """What the thread has to do once a batch was answered, and nobody waits for; None: nothing."""
        return None

    @abstractmethod
    def _shut(self) -> None:
        """Lets others open the journal."""

    # Shared

    def append(self, record: dict[str, Any], payload: bytes = b"") -> asyncio.Future[Position]:
        """Queues one entry at once, so order is the order of calls; the future gives its position when it is durable.

        The future raises JournalFailed when it could not be made durable (the disk is full, for instance).
        """
        return self._queued([(record, payload)], many=False)

    def append_all(self, entries: Sequence[tuple[dict[str, Any], bytes]]) -> asyncio.Future[list[Position]]:
        """As `append`, of several entries in order, with one future for all."""
        return self._queued(entries, many=True)

    def _queued(self, entries: Sequence[tuple[dict[str, Any], bytes]], *, many: bool) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        num_bytes = 0
        for record, payload in entries:
            body = msgpack.packb(record)
            # The checksum is taken here, where the payload is in the cache, and not in the thread, which would wait for the interpreter's lock after each.
            self._queue.append((body, payload, crc32(payload), key_of(record)))
            num_bytes += len(body) + len(payload)
        self._waiters.append((future, len(entries), num_bytes, many))
        self._add_pending(num_bytes)
        if self._writer is None or self._writer.done():
            self._writer = loop.create_task(self._write_all(), name="journal writer")
        return future

    async def drained(self) -> None:
        """Returns once at most max_pending_bytes wait for the disk: callers that read from the network await it before each append."""
        await self._room.wait()

    async def close(self) -> None:
        """Waits for what is queued, then lets others open the journal."""
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._thread.shutdown()
        self._shut()

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and self._failure is None:
            batch, waiters, self._queue, self._waiters = self._queue, self._waiters, [], []
            try:
                positions = await loop.run_in_executor(self._thread, self._write, batch)
            except Exception as error:  # supervised edge: whatever it was, nothing may be written after records that are not
                self._failure = error if isinstance(error, JournalFailed) else JournalFailed(f"journal {self.name} could not be written: {type(error).__name__}: {error}; restart")
                self._fail([*waiters, *self._waiters])
                return
            self._answer(waiters, positions)
            if (chore := self._chore()) is not None:
                await loop.run_in_executor(self._thread, chore)

    def _answer(self, waiters: list[_Waiter], positions: list[Position]) -> None:
        first = 0
        for future, count, num_bytes, many in waiters:
            self._add_pending(-num_bytes)
            if not future.done():
                future.set_result(positions[first : first + count] if many else positions[first])
            first += count

    def _fail(self, waiters: list[_Waiter]) -> None:
        self._queue, self._waiters = [], []
        self._add_pending(-self._pending_bytes)
        for future, *_ in waiters:
            if not future.done():
                assert self._failure is not None
                future.set_exception(self._failure)

    def _add_pending(self, num_bytes: int) -> None:
        self._pending_bytes += num_bytes
        if self._pending_bytes <= self._max_pending_bytes:
            self._room.set()
        else:
            self._room.clear()
