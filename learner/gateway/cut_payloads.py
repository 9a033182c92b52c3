"""The payloads that a cut holds, so that it can be restored without its journal: `payloads.bin` in the cut's folder.

MAGIC and the schema number, then one entry a sample: a head (lengths of key and payload, CRC-32 of the rest), the key as msgpack
[group_id, sample_index], the payload as it is. Last an entry of no key whose payload is the number of entries, so that a short file
is told from a whole one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgpack
from isal.isal_zlib import crc32

from learner.gateway.appends import Key

NAME = "payloads.bin"
SCHEMA = 1
_HEADER = b"HEADRPAY" + struct.pack("<I", SCHEMA)
_HEAD = struct.Struct("<III")
_COUNT = struct.Struct("<Q")


def write(path: Path, keys: Iterable[Key], payload: Callable[[Key], bytes]) -> int:
    """One entry a key, payloads asked for one by one; how many. Raises OSError, and what `payload` raises."""
    count = 0
    with path.open("wb") as file:
        file.write(_HEADER)
        for key in keys:
            _put(file, msgpack.packb(list(key)), payload(key))
            count += 1
        _put(file, b"", _COUNT.pack(count))
    return count


def read(path: Path) -> Iterator[tuple[Key, bytes]]:
    """Every entry in order. Raises ValueError for a file that is damaged, short, or of another schema."""
    with path.open("rb") as file:
        _check_header(path, file.read(len(_HEADER)))
        count = 0
        while True:
            offset = file.tell()
            start = file.read(_HEAD.size)
            if len(start) < _HEAD.size:
                raise ValueError(f"{path} ends at byte {offset} after {count} payloads: it is not whole")
            num_key, num_payload, crc = _HEAD.unpack(start)
            name, payload = file.read(num_key), file.read(num_payload)
            if len(payload) < num_payload or crc32(payload, crc32(name)) != crc:
                raise ValueError(f"{path} is damaged at byte {offset}: the checksum of payload {count} does not match")
            if not name:
                if _COUNT.unpack(payload)[0] != count:
                    raise ValueError(f"{path} should hold {_COUNT.unpack(payload)[0]} payloads and holds {count}")
                return
            group, index = msgpack.unpackb(name)
            yield (group, index), payload
            count += 1


def _put(file: BinaryIO, name: bytes, payload: bytes) -> None:
    file.write(_HEAD.pack(len(name), len(payload), crc32(payload, crc32(name))))
    file.write(name)
    file.write(payload)


def _check_header(path: Path, start: bytes) -> None:
    if start == _HEADER:
        return
    if start[:8] == _HEADER[:8]:
        raise ValueError(f"{path} has schema {int.from_bytes(start[8:], 'little')}, this program reads {SCHEMA}; use the version that wrote it")
    raise ValueError(f"{path} does not begin as the payloads of a cut do")
