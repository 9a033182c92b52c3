"""The journal: an append-only log in segments. What was answered as durable survives a crash of the machine.

    append() ─▶ queue ─▶ one writer thread: writev, fdatasync ─▶ the futures of the whole batch

    loop:   the writer task consumes the queue, produces resolved futures, waits for the thread, is unblocked by append()
    thread: consumes one batch at a time; while it syncs, the next batch gathers, so many waiters share one fdatasync

    folder/LOCK              flock held while open: a second gateway on the same journal is refused
    folder/000000000000.log  a segment (segments.py); a new one once segment_bytes are written
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack

from learner.gateway.segments import (
    HEAD_BYTES,
    HEADER,
    Entry,
    JournalDamaged,
    Position,
    TornTail,
    head,
    read_payload,
    read_segment,
    segment_numbers,
    segment_path,
)

_log = logging.getLogger("headrace.gateway.journal")
_IOV_MAX = 1024

Item = tuple[bytes, bytes, "asyncio.Future[Position]"]


class JournalLocked(ValueError):
    """Another process has the journal open."""


class JournalFailed(RuntimeError):
    """An append did not become durable; the journal takes nothing more until it is opened again."""


class Journal:
    """One opened journal. Read it to its end first, then append.

    Raises JournalLocked when another process has it open. max_pending_bytes: see `drained`.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, max_pending_bytes: int = 64 << 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.num_syncs = 0
        self._segment_bytes = segment_bytes
        self._max_pending_bytes = max_pending_bytes
        self._lock = _lock(folder)
        self._file: int | None = None
        self._number = 0
        self._durable = 0
        self._queue: list[Item] = []
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._failure: JournalFailed | None = None
        self._writer: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def read(self) -> Iterator[Entry]:
        """Every entry, oldest first; then the journal is ready for appends. Cuts off a torn tail, with a warning.

        Raises JournalDamaged, naming file and offset, where entries that were durable cannot be read.
        """
        assert self._file is None, "the journal is read once, before the first append"
        numbers = segment_numbers(self.folder)
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise JournalDamaged(f"journal {self.folder} has segments {numbers}: some in between are missing; put them back")
        for number in numbers:
            path = segment_path(self.folder, number)
            for entry in read_segment(path, last=number == numbers[-1]):
                if isinstance(entry, TornTail):
                    _log.warning("journal %s: cut off %d bytes at byte %d that were never acknowledged: %s", path, entry.num_bytes, entry.offset, entry.why)
                    os.truncate(path, entry.offset)
                else:
                    yield entry
        self._number = numbers[-1] if numbers else 0
        self._open_segment()

    def append(self, record: dict[str, Any], payload: bytes = b"") -> asyncio.Future[Position]:
        """Queues one entry at once, so order is the order of calls; the future gives its position when it is durable.

        The future raises JournalFailed when it could not be made durable (the disk is full, for instance).
        """
        assert self._file is not None, "read the journal to its end before appending"
        future: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            future.set_exception(self._failure)
            return future
        body = msgpack.packb(record)
        self._queue.append((body, payload, future))
        self._add_pending(len(body) + len(payload))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="journal writer")
        return future

    async def drained(self) -> None:
        """Returns once at most max_pending_bytes wait for the disk: callers that read from the network await it before each append."""
        await self._room.wait()

    def payload(self, position: Position) -> bytes:
        """The payload of the entry at a position. Raises JournalDamaged when there is no whole entry."""
        return next(self.payloads([position]))

    def payloads(self, positions: Iterable[Position]) -> Iterator[bytes]:
        """The payloads of the entries at positions, each checked. Raises JournalDamaged when one is not whole."""
        with ExitStack() as opened:
            files: dict[int, tuple[int, int]] = {}  # segment to descriptor and bytes
            for position in positions:
                path = segment_path(self.folder, position.segment)
                if position.segment not in files:
                    number = opened.enter_context(path.open("rb")).fileno()
                    files[position.segment] = number, os.fstat(number).st_size
                entry = read_payload(files[position.segment][0], position, files[position.segment][1])
                if isinstance(entry, str):
                    raise JournalDamaged(f"journal {path} is damaged at byte {position.offset}: {entry}; restart from the newest checkpoint")
                yield entry

    def forget(self, before: Position) -> int:
        """Deletes the segments that hold only entries before a position; returns how many."""
        numbers = [number for number in segment_numbers(self.folder) if number < min(before.segment, self._number)]
        for number in numbers:  # oldest first, so that a crash in between leaves no gap
            segment_path(self.folder, number).unlink()
        if numbers:
            _sync_folder(self.folder)
        return len(numbers)

    async def close(self) -> None:
        """Waits for what is queued, then lets others open the journal."""
        if self._writer is not None:
            await asyncio.wait([self._writer])
        self._thread.shutdown()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.close(self._lock)

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and self._failure is None:
            batch, self._queue = self._queue, []
            try:
                positions = await loop.run_in_executor(self._thread, self._write, batch)
            except Exception as error:  # supervised edge: whatever it was, those who wait must hear of it
                path = segment_path(self.folder, self._number)
                why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._failure = JournalFailed(f"journal {path} could not be written at byte {self._durable}: {why}; make room or repair the disk, then restart")
                self._fail([*batch, *self._queue])
                return
            for (body, payload, future), position in zip(batch, positions, strict=True):
                self._add_pending(-len(body) - len(payload))
                if not future.done():
                    future.set_result(position)

    def _fail(self, items: list[Item]) -> None:
        self._queue = []
        self._add_pending(-self._pending_bytes)
        for _, _, future in items:
            if not future.done():
                assert self._failure is not None
                future.set_exception(self._failure)

    def _add_pending(self, num_bytes: int) -> None:
        self._pending_bytes += num_bytes
        if self._pending_bytes <= self._max_pending_bytes:
            self._room.set()
        else:
            self._room.clear()

    def _write(self, batch: list[Item]) -> list[Position]:
        """In the thread: one batch, durable when it returns. After an error the segment ends where it was durable before."""
        if self._durable >= self._segment_bytes:
            self._next_segment()
        assert self._file is not None
        buffers: list[bytes] = []
        positions: list[Position] = []
        offset = self._durable
        for body, payload, _ in batch:
            positions.append(Position(self._number, offset))
            buffers += (head(body, payload, self._durable), body, payload)
            offset += HEAD_BYTES + len(body) + len(payload)
        try:
            _write_buffers(self._file, buffers)
            os.fdatasync(self._file)
        except Exception:
            os.ftruncate(self._file, self._durable)
            raise
        self.num_syncs += 1
        self._durable = offset
        return positions

    def _next_segment(self) -> None:
        assert self._file is not None
        os.close(self._file)
        self._number += 1
        self._open_segment()

    def _open_segment(self) -> None:
        """Opens the segment for appends; a new or headless one gets its header, durably, name included."""
        self._file = os.open(segment_path(self.folder, self._number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._durable = os.fstat(self._file).st_size
        if self._durable == 0:
            _write_buffers(self._file, [HEADER])
            self._durable = len(HEADER)
        os.fdatasync(self._file)
        _sync_folder(self.folder)


def _lock(folder: Path) -> int:
    lock = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise JournalLocked(f"journal {folder} is open in another process (pid {holder}): one run folder has one gateway; stop that one, or use another run_dir") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _write_buffers(file: int, buffers: list[bytes]) -> None:
    """All bytes of all buffers, in order. Raises OSError."""
    for start in range(0, len(buffers), _IOV_MAX):
        chunk = buffers[start : start + _IOV_MAX]
        missing = sum(map(len, chunk)) - os.writev(file, chunk)
        while missing:  # a short write: the disk is nearly full, or a signal came
            rest = b"".join(chunk)[-missing:]
            missing -= os.write(file, rest)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
