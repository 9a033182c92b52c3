"""Format of one journal segment, and reading it.

A segment is MAGIC, the schema number, then entries. An entry is a head, the record as msgpack, and the payload as it is. The head:
a marker, the two lengths, how many bytes of the segment were durable when the entry was written, and a CRC-32 of everything else.
The durable count tells a torn tail from damage: a bad entry before that count of any later one had been on disk once.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

MAGIC = b"HEADRACE"
SCHEMA = 1
HEADER = MAGIC + struct.pack("<I", SCHEMA)
SUFFIX = ".log"
_MARKER = b"\xabHRE"
_FIELDS = struct.Struct("<III")
HEAD_BYTES = len(_MARKER) + _FIELDS.size + 4


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


def head(body: bytes, payload: bytes, durable_bytes: int) -> bytes:
    """The head that goes before a body and its payload."""
    fields = _FIELDS.pack(len(body), len(payload), durable_bytes)
    return _MARKER + fields + _crc(fields, body, payload).to_bytes(4, "little")


def read_segment(path: Path, *, last: bool) -> Iterator[Entry | TornTail]:
    """The entries of one segment in order; in the last one, a torn tail may come at the end.

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
        offset = len(HEADER)
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


def read_payload(file: int, position: Position, end: int) -> bytes | str:
    """The payload alone of the entry at a position, checked as a whole; or why there is none, as with read_entry."""
    whole = _read_whole(file, position, end)
    return whole if isinstance(whole, str) else whole[1]


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


def _crc(fields: bytes, body: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(body, zlib.crc32(fields)))


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
