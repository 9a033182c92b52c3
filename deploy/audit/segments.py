"""Reads the raw journal of the `segments` backend: `RUN_DIR/journal/NNNNNNNNNNNN.log`, numbered without gaps.

A segment is the 8 bytes HEADRACE, a schema number (u32, little-endian as all numbers here), then entries. An entry:

    AB 48 52 45 │ body bytes u32 │ payload bytes u32 │ durable u32 │ CRC-32 u32 │ body: msgpack │ payload: protobuf Trajectory

The CRC is over the three lengths, the body and the payload. `durable` is how far the segment was on the disk when the entry was written: so
bytes that cannot be read are a torn tail only where no later entry knows that they had been whole.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgpack

from deploy.audit.entry import DAMAGED, Entry
from deploy.audit.findings import Findings

SCHEMA = 1
_START = b"HEADRACE" + struct.pack("<I", SCHEMA)
_MARK = b"\xab\x48\x52\x45"
_LENGTHS = struct.Struct("<III")
_HEAD_BYTES = 4 + _LENGTHS.size + 4


def name_of(segment: int) -> str:
    return f"journal/{segment:012d}.log"


def numbers_in(run_dir: Path) -> list[int]:
    return sorted(int(path.stem) for path in (run_dir / "journal").glob("*.log") if path.stem.isdigit())


def beginning(run_dir: Path) -> tuple[str, bool]:
    """The first segment that is there, and whether it is the run's first. Raises ValueError when there is none."""
    numbers = numbers_in(run_dir)
    if not numbers:
        raise ValueError(f"{run_dir / 'journal'}: holds no segments (*.log); give the folder of a run that has begun")
    return name_of(numbers[0]), numbers[0] == 0


def read(run_dir: Path, findings: Findings) -> Iterator[Entry]:
    """All readable entries in order; what cannot be read is a finding, and reading goes on behind it."""
    numbers = numbers_in(run_dir)
    for before, after in itertools.pairwise(numbers):
        findings.must(after == before + 1, DAMAGED, name_of(before), f"the next segment is {name_of(after)}; {after - before - 1} between them are missing")
    for number in numbers:
        data = (run_dir / name_of(number)).read_bytes()
        last = number == numbers[-1]
        if last and len(data) < len(_START):
            findings.notes.append(f"{name_of(number)} has no whole header: a crash came before its first record")
        elif findings.must(data.startswith(_START), DAMAGED, f"{name_of(number)} at 0", f"begins with {data[:12]!r} and not with HEADRACE and schema {SCHEMA}"):
            yield from _entries(number, data, last, findings)


def _entries(number: int, data: bytes, last: bool, findings: Findings) -> Iterator[Entry]:
    offset = len(_START)
    while offset < len(data):
        found = _entry(data, offset)
        if isinstance(found, str):
            behind, knows = _resume(data, offset)
            where = f"{name_of(number)} at {offset}"
            if last and not knows:
                findings.notes.append(f"{where}: a torn tail of {len(data) - offset} bytes ({found}); nobody was answered for it")
                return
            findings.must(False, DAMAGED, where, f"{found}, though it had been whole once; {behind - offset} bytes are lost")
            offset = behind
            continue
        body, payload, _ = found
        findings.checked[DAMAGED] += 1
        yield Entry(position=(number, offset), where=f"{name_of(number)} at {offset}", record=msgpack.unpackb(body, strict_map_key=False), payload=payload)
        offset += _HEAD_BYTES + len(body) + len(payload)


def _entry(data: bytes, offset: int) -> tuple[bytes, bytes, int] | str:
    """(body, payload, durable) of the whole entry at an offset, or why there is none."""
    if data[offset : offset + 4] != _MARK:
        return "no entry begins there"
    if len(data) < offset + _HEAD_BYTES:
        return "the head of an entry is cut short"
    lengths = data[offset + 4 : offset + 4 + _LENGTHS.size]
    num_body, num_payload, durable = _LENGTHS.unpack(lengths)
    start = offset + _HEAD_BYTES
    middle, end = start + num_body, start + num_body + num_payload
    if end > len(data):
        return f"the entry would end at {end}, the segment ends at {len(data)}"
    if zlib.crc32(data[start:end], zlib.crc32(lengths)) != int.from_bytes(data[start - 4 : start], "little"):
        return "the checksum does not match"
    return data[start:middle], data[middle:end], durable


def _resume(data: bytes, bad: int) -> tuple[int, bool]:
    """Where the next whole entry behind a bad one begins (the end: nowhere), and whether a later one knows that the bad one was durable."""
    first, at = len(data), data.find(_MARK, bad + 1)
    while at >= 0:
        found = _entry(data, at)
        if not isinstance(found, str):
            first = min(first, at)
            if found[2] > bad:
                return first, True
        at = data.find(_MARK, at + 1)
    return first, False
