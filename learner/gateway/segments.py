"""Format of one journal segment, and reading it.

A segment is MAGIC, the schema number, then entries. An entry is a head, the record as msgpack, and the payload as it is. The head:
a marker, the two lengths, how many bytes of the segment were durable when the entry was written, and a CRC-32 of everything else.
The durable count tells a torn tail from damage: a bad entry before that count of any later one had been on disk once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from isal.isal_zlib import crc32, crc32_combine

MAGIC = b"HEADRACE"
SCHEMA = 1
HEADER = MAGIC + struct.pack("<I", SCHEMA)
SUFFIX = ".log"
_MARKER = b"\xabHRE"
_FIELDS = struct.Struct("<III")
HEAD_BYTES = len(_MARKER) + _FIELDS.size + 4
RUN_BYTES, GAP_BYTES = 1 << 20, 128 << 10  # of payloads read at once, and between two of them
FIRST_ENTRY_BYTES = 32 << 10  # how long the last entry of a run is thought to be, until longer ones were seen


class JournalDamaged(RuntimeError):
    """A journal that cannot be read as a whole; the message names file and offset."""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """Where an entry begins: segment number and byte offset in it. Later entries compare greater."""

    segment: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry as read back; payload is empty where none was given. durable_bytes: see the module."""

    position: Position
    record: dict[str, Any]
    payload: bytes
    num_bytes: int
    durable_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TornTail:
    """What a crash left after the last whole entry of the last segment."""

    offset: int
    num_bytes: int
    why: str


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}{SUFFIX}"


def segment_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}"))


def head(body: bytes, payload: bytes | memoryview, durable_bytes: int, payload_crc: int | None = None) -> bytes:
    """The head that goes before a body and its payload. payload_crc: the payload's own CRC-32 where it was taken before."""
    fields = _FIELDS.pack(len(body), len(payload), durable_bytes)
    crc = _crc(fields, body, payload) if payload_crc is None else crc32_combine(crc32(body, crc32(fields)), payload_crc, len(payload))
    return _MARKER + fields + crc.to_bytes(4, "little")


def read_segment(path: Path, *, last: bool, offset: int = 0) -> Iterator[Entry | TornTail]:
    """The entries of one segment in order, from an entry's offset on (0: all); in the last one, a torn tail may come at the end.

    Raises JournalDamaged for an unknown schema, and for an entry that was durable once and is not whole now.
    """
    number = int(path.stem)
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        start = file.read(len(HEADER))
        if last and len(start) < len(HEADER):
            yield TornTail(offset=0, num_bytes=len(start), why="its header is not whole")
            return
        _check_header(path, start)
        offset = max(offset, len(HEADER))
        while offset < end:
            entry = read_entry(file.fileno(), Position(number, offset), end)
            if isinstance(entry, str):
                if not last or _was_durable(file.fileno(), number, offset, end):
                    raise JournalDamaged(
                        f"journal {path} is damaged at byte {offset}: {entry}, yet what follows shows that it had been whole; "
                        "restore the file from a copy, or start a new run folder from a checkpoint's weights"
                    )
                yield TornTail(offset=offset, num_bytes=end - offset, why=entry)
                return
            yield entry
            offset += entry.num_bytes


def read_entry(file: int, position: Position, end: int) -> Entry | str:
    """The entry at a position, or why there is no whole one before byte `end`."""
    whole = _read_whole(file, position, end)
    if isinstance(whole, str):
        return whole
    body, payload, durable = whole
    record = msgpack.unpackb(body, strict_map_key=False)
    return Entry(position=position, record=record, payload=payload, num_bytes=HEAD_BYTES + len(body) + len(payload), durable_bytes=durable)


class PayloadReader:
    """Payloads of the entries at some offsets of one open segment, each checked as a whole. Neighbours come with one read.

    offsets: in the order in which `payload` will be asked for them. end: of the file.
    """

    def __init__(self, file: int, offsets: Sequence[int], end: int) -> None:
        self._file, self._end = file, end
        self._reads = runs(offsets)
        self._start, self._data = 0, memoryview(b"")
        self._longest = FIRST_ENTRY_BYTES

    def payload(self, offset: int) -> memoryview | str:
        """Part of what was read for several; or why no whole entry is there, as with read_entry."""
        if offset in self._reads:
            self._read(offset, self._reads.pop(offset) + self._longest)
        start = self._part(offset, HEAD_BYTES)
        if len(start) < HEAD_BYTES:
            return f"{len(start)} bytes are less than the head of an entry"
        if start[: len(_MARKER)] != _MARKER:
            return "no entry begins there"
        fields = start[len(_MARKER) : -4]
        num_body, num_payload, _ = _FIELDS.unpack(fields)
        num_bytes = HEAD_BYTES + num_body + num_payload
        self._longest = max(self._longest, num_bytes)
        entry = self._part(offset, num_bytes)
        if len(entry) < num_bytes:
            return f"the entry should have {num_bytes} bytes and {len(entry)} are there"
        if crc32(entry[HEAD_BYTES:], crc32(fields)) != int.from_bytes(start[-4:], "little"):
            return "the checksum of the entry does not match"
        return entry[HEAD_BYTES + num_body :]

    def _part(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the file, fewer at its end."""
        first = offset - self._start
        if first < 0 or first + num_bytes > len(self._data):
            self._read(offset, num_bytes)
            first = 0
        return self._data[first : first + num_bytes]

    def _read(self, offset: int, num_bytes: int) -> None:
        self._start, self._data = offset, memoryview(os.pread(self._file, max(0, min(num_bytes, self._end - offset)), offset))


def runs(offsets: Sequence[int]) -> dict[int, int]:
    """What to read at once: the first offset of each run of neighbours, and how far the last one of the run lies behind it.

    Offsets rise inside a run, by at most GAP_BYTES, and by RUN_BYTES in all. Example: runs([0, 500, 90, 95]) == {0: 500, 90: 5}.
    """
    found: dict[int, int] = {}
    first = last = None
    for offset in offsets:
        if first is None or last is None or not last < offset <= min(last + GAP_BYTES, first + RUN_BYTES):
            first = offset
        found[first] = offset - first
        last = offset
    return found


def _read_whole(file: int, position: Position, end: int) -> tuple[bytes, bytes, int] | str:
    """(body, payload, durable bytes) of an entry whose checksum is right."""
    left = end - position.offset
    if left < HEAD_BYTES:
        return f"{left} bytes are less than the head of an entry"
    start = os.pread(file, HEAD_BYTES, position.offset)
    if not start.startswith(_MARKER):
        return "no entry begins there"
    fields, crc = start[len(_MARKER) : -4], int.from_bytes(start[-4:], "little")
    num_body, num_payload, durable = _FIELDS.unpack(fields)
    if left < HEAD_BYTES + num_body + num_payload:
        return f"the entry should have {HEAD_BYTES + num_body + num_payload} bytes and {left} are there"
    body = os.pread(file, num_body, position.offset + HEAD_BYTES)
    payload = os.pread(file, num_payload, position.offset + HEAD_BYTES + num_body)
    return (body, payload, durable) if _crc(fields, body, payload) == crc else "the checksum of the entry does not match"


def _crc(fields: bytes, body: bytes, payload: bytes | memoryview) -> int:
    return crc32(payload, crc32(body, crc32(fields)))


def _check_header(path: Path, start: bytes) -> None:
    if not start.startswith(MAGIC) or len(start) < len(HEADER):
        raise JournalDamaged(f"journal {path} does not begin as a journal segment does (byte 0: {start!r}); move it out of the folder")
    schema = int.from_bytes(start[len(MAGIC) :], "little")
    if schema != SCHEMA:
        raise JournalDamaged(f"journal {path} has schema {schema}, this program reads {SCHEMA}; use the version that wrote it")


def _was_durable(file: int, number: int, offset: int, end: int) -> bool:
    data = os.pread(file, end - offset, offset)
    at = data.find(_MARKER, 1)
    while at >= 0:
        entry = read_entry(file, Position(number, offset + at), end)
        if isinstance(entry, Entry) and entry.durable_bytes > offset:
            return True
        at = data.find(_MARKER, at + 1)
    return False
