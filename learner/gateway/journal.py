"""The journal on a local disk: an append-only log in segments. What was answered as durable survives a crash of the machine.

    folder/LOCK              flock held while open: a second gateway on the same journal is refused
    folder/000000000000.log  a segment (segments.py); a new one once segment_bytes are written
    folder/index.sqlite      positions by identity (journal_index.py); never the truth
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from learner.gateway.appends import Appends, Item, JournalFailed, JournalLocked, Key, key_of
from learner.gateway.journal_index import Index
from learner.gateway.segments import (
    HEAD_BYTES,
    HEADER,
    Entry,
    JournalDamaged,
    PayloadReader,
    Position,
    TornTail,
    head,
    read_entry,
    read_segment,
    segment_numbers,
    segment_path,
)
from protos import faultpoints

__all__ = ["Journal", "JournalDamaged", "JournalFailed", "JournalLocked", "Position"]

_log = logging.getLogger("headrace.gateway.journal")
_IOV_MAX = 1024
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
ROOM_S = 0.5  # between two looks for room


class Journal(Appends):
    """One opened journal. Read it to its end first, then append.

    Raises JournalLocked when another process has it open. max_pending_bytes: see `drained`.
    """

    def __init__(self, folder: Path, *, segment_bytes: int = 64 << 20, max_pending_bytes: int = 64 << 20) -> None:
        super().__init__(max_pending_bytes=max_pending_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder)
        self._file: int | None = None
        self._number = 0
        self._durable = 0
        self._index = Index(folder)
        self._closing = threading.Event()

    @property
    def name(self) -> str:
        return str(self.folder)

    def is_empty(self) -> bool:
        sizes = [segment_path(self.folder, number).stat().st_size for number in segment_numbers(self.folder)]
        return all(size <= len(HEADER) for size in sizes)

    def has(self, position: Position) -> bool:
        path = segment_path(self.folder, position.segment)
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return isinstance(read_entry(file.fileno(), position, os.fstat(file.fileno()).st_size), Entry)

    def begin_after(self, position: Position) -> None:
        assert self._file is None and self.is_empty(), "only an empty journal may begin later"
        for number in segment_numbers(self.folder):
            segment_path(self.folder, number).unlink()
        self._index.reset()
        self._number = position.segment + 1

    def read(self, after: Position | None = None) -> Iterator[Entry]:
        """See Appends. Cuts off a torn tail, with a warning. Reads from where the index stands, if that is earlier.

        Raises JournalDamaged, naming file and offset, where entries that were durable cannot be read.
        """
        assert self._file is None, "the journal is read once, before the first append"
        numbers = segment_numbers(self.folder)
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise JournalDamaged(f"journal {self.folder} has segments {numbers}: some in between are missing; put them back")
        indexed = self._trusted_index(numbers)
        start = min(after, indexed) if after is not None and indexed is not None else None
        for entry in self._read_from(numbers, start):
            if indexed is None or entry.position > indexed:
                self._index.note(entry.position, key_of(entry.record))
                if self._index.is_behind:
                    self._index.flush()
            if after is None or entry.position > after:
                yield entry
        self._number = numbers[-1] if numbers else self._number
        self._open_segment()
        self._index.flush()
        self.num_bytes = self.bytes_since(None)

    def _trusted_index(self, numbers: list[int]) -> Position | None:
        """Up to where the index is right. One that knows of an entry that the log does not have belongs to another log."""
        reached = self._index.reached
        if reached is not None and (not numbers or reached.segment < numbers[0] or not self.has(reached)):
            _log.warning("index of journal %s does not belong to it; it is made again", self.folder)
            self._index.reset()
        return self._index.reached

    def _read_from(self, numbers: list[int], start: Position | None) -> Iterator[Entry]:
        """Entries from a position on (None: all); the last torn tail is cut off."""
        for number in numbers:
            path = segment_path(self.folder, number)
            if start is not None and number < start.segment:
                continue
            offset = start.offset if start is not None and number == start.segment else 0
            for entry in read_segment(path, last=number == numbers[-1], offset=offset):
                if isinstance(entry, TornTail):
                    _log.warning("journal %s: cut off %d bytes at byte %d that were never acknowledged: %s", path, entry.num_bytes, entry.offset, entry.why)
                    os.truncate(path, entry.offset)
                else:
                    yield entry

    def find(self, keys: Iterable[Key]) -> dict[Key, Position]:
        wanted = set(keys)
        found = self._index.find(wanted)
        if found is not None:
            return found
        paths = [segment_path(self.folder, number) for number in segment_numbers(self.folder)]
        entries = (entry for path in paths for entry in read_segment(path, last=path == paths[-1]) if isinstance(entry, Entry))
        return {key: entry.position for entry in entries if (key := key_of(entry.record)) in wanted and key is not None}

    def payload(self, position: Position) -> bytes:
        """See Appends."""
        return bytes(next(self.payloads([position])))

    def payloads(self, positions: Sequence[Position]) -> Iterator[bytes | memoryview]:
        """See Appends; each segment is opened once, and each entry checked."""
        offsets: dict[int, list[int]] = {}
        for position in positions:
            offsets.setdefault(position.segment, []).append(position.offset)
        with ExitStack() as opened:
            readers: dict[int, PayloadReader] = {}
            for segment, those in offsets.items():
                file = opened.enter_context(segment_path(self.folder, segment).open("rb", buffering=0)).fileno()
                readers[segment] = PayloadReader(file, those, os.fstat(file).st_size)
            for position in positions:
                payload = readers[position.segment].payload(position.offset)
                if isinstance(payload, str):
                    path = segment_path(self.folder, position.segment)
                    raise JournalDamaged(f"journal {path} is damaged at byte {position.offset}: {payload}; restart from the newest checkpoint")
                yield payload

    def forget(self, before: Position) -> int:
        """Deletes the segments that hold only entries before a position; returns how many."""
        numbers = [number for number in segment_numbers(self.folder) if number < min(before.segment, self._number)]
        num_bytes = sum(segment_path(self.folder, number).stat().st_size for number in numbers)
        for number in numbers:  # oldest first, so that a crash in between leaves no gap
            segment_path(self.folder, number).unlink()
        if numbers:
            _sync_folder(self.folder)
            self._thread.submit(self._forgotten, numbers[-1] + 1, num_bytes).result()
        return len(numbers)

    def _forgotten(self, before_segment: int, num_bytes: int) -> None:
        """In the thread, which counts the bytes that come as well."""
        self._index.forget(before_segment)
        self.num_bytes -= num_bytes

    def bytes_since(self, position: Position | None) -> int:
        numbers = [number for number in segment_numbers(self.folder) if position is None or number >= position.segment]
        total = sum(segment_path(self.folder, number).stat().st_size for number in numbers)
        return max(0, total - (position.offset if position is not None and position.segment in numbers else 0))

    def _shut(self) -> None:
        self._index.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None
        os.close(self._lock)

    def _write(self, batch: list[Item]) -> list[Position]:
        """See Appends. After a failure the segment ends where it was durable before. A disk without room is waited for: nothing is
        acknowledged meanwhile, so actors, leases and batches wait too, and nothing is lost."""
        assert self._file is not None, "read the journal to its end before appending"
        waiting = False
        while True:
            try:
                positions = self._write_durably(batch)
                if waiting:
                    _log.warning("journal %s: there is room again", self.folder)
                return positions
            except OSError as error:
                path = segment_path(self.folder, self._number)
                if error.errno not in NO_ROOM or self._closing.wait(ROOM_S):
                    raise JournalFailed(f"journal {path} could not be written at byte {self._durable}: {error.strerror}; make room or repair the disk, then restart") from error
                if not waiting:
                    _log.error("journal %s: %s at byte %d; nothing is taken and training waits until there is room", path, error.strerror, self._durable)
                waiting = True

    async def close(self) -> None:
        self._closing.set()
        await super().close()

    def _write_durably(self, batch: list[Item]) -> list[Position]:
        if self._durable >= self._segment_bytes:
            self._next_segment()
        assert self._file is not None
        buffers: list[bytes] = []
        positions: list[Position] = []
        offset = self._durable
        for body, payload, payload_crc, _ in batch:
            positions.append(Position(self._number, offset))
            buffers += (head(body, payload, self._durable, payload_crc), body, payload)
            offset += HEAD_BYTES + len(body) + len(payload)
        try:
            _write_buffers(self._file, buffers)
            began_s = time.monotonic()
            faultpoints.point("before_fsync")
            os.fdatasync(self._file)
            self.sync_s += time.monotonic() - began_s
        except Exception:
            os.ftruncate(self._file, self._durable)
            raise
        faultpoints.point("after_fsync")
        self.num_syncs += 1
        self.num_bytes += offset - self._durable
        self._durable = offset
        for position, (_, _, _, key) in zip(positions, batch, strict=True):
            self._index.note(position, key)
        return positions

    def _chore(self) -> Callable[[], None] | None:
        return self._index.flush if self._index.is_behind else None

    def _next_segment(self) -> None:
        old, self._number = self._file, self._number + 1
        assert old is not None
        try:
            self._open_segment()
        except OSError:
            self._number -= 1
            raise
        os.close(old)
        self.num_bytes += len(HEADER)

    def _open_segment(self) -> None:
        """Opens the segment for appends; a new or headless one gets its header, durably, name included."""
        file = os.open(segment_path(self.folder, self._number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if os.fstat(file).st_size < len(HEADER):  # new, or what a full disk left of one
                os.ftruncate(file, 0)
                _write_buffers(file, [HEADER])
            os.fdatasync(file)
            _sync_folder(self.folder)
        except OSError:
            os.close(file)
            raise
        self._file, self._durable = file, os.fstat(file).st_size


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
