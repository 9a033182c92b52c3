"""What a cut keeps of its own, so that it stands alone: checksums of its files, and the payloads of its open groups.

cut.json has `files`: name to {"bytes", "xxh3"} of the gateway's files; each rank leaves the same in sums-RANK.json (XXH3, 128 bits).
payloads.bin begins with HEADRPAY and a schema number (u32), then entries: key bytes u32 │ payload bytes u32 │ CRC-32 u32 │ key: msgpack
[group_id, sample_index] │ payload. The last has no key, and its payload is the number of entries (u64).
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import xxhash

_START = b"HEADRPAY" + struct.pack("<I", 1)
_HEAD = struct.Struct("<III")


def payloads(path: Path) -> dict[tuple[int, int], bytes]:
    """By (number of the group, sample index). Raises ValueError where the file is not whole."""
    data, offset = path.read_bytes(), len(_START)
    if not data.startswith(_START):
        raise ValueError(f"{path.name} begins with {data[:12]!r}")
    found: dict[tuple[int, int], bytes] = {}
    while True:
        if len(data) < offset + _HEAD.size:
            raise ValueError(f"{path.name} ends at {offset} without its last entry")
        num_key, num_payload, crc = _HEAD.unpack_from(data, offset)
        middle = offset + _HEAD.size + num_key
        key, payload = data[offset + _HEAD.size : middle], data[middle : middle + num_payload]
        if zlib.crc32(payload, zlib.crc32(key)) != crc:
            raise ValueError(f"{path.name} at {offset}: the checksum does not match")
        if not key:
            if int.from_bytes(payload, "little") != len(found):
                raise ValueError(f"{path.name} has {len(found)} payloads and says {int.from_bytes(payload, 'little')}")
            return found
        group_id, index = msgpack.unpackb(key)
        found[int(group_id[1:]), index] = payload
        offset = middle + num_payload


def complaints(folder: Path, files: dict[str, Any]) -> Iterator[str]:
    """What differs from the checksums, a line a file."""
    expected = dict(files)
    for path in sorted(folder.glob("sums-*.json")):
        try:
            expected.update(json.loads(path.read_bytes()))
        except ValueError as error:
            yield f"{path.name} cannot be read: {error}"
    if ".metadata" not in expected:
        yield "no rank left checksums of its files (sums-0.json)"
    for name, content in expected.items():
        data = (folder / name).read_bytes() if (folder / name).is_file() else None
        if data is None:
            yield f"{name}: the file is missing"
        elif len(data) != content["bytes"]:
            yield f"{name}: the file ends at {len(data)}, it had {content['bytes']} bytes when it was saved"
        elif xxhash.xxh3_128_hexdigest(data) != content["xxh3"]:
            yield f"{name}: the checksum of the file does not match"
