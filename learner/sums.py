"""Checksums of a cut's files: written when it is saved, compared when it is verified."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash


def digest(data: bytes) -> str:
    """XXH3-128 of some bytes, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(data))


def file_sum(path: Path) -> dict[str, Any]:
    """{"bytes", "xxh3"} of a file, read in pieces. Raises OSError."""
    state, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            state.update(piece)
            size += len(piece)
    return {"bytes": size, "xxh3": state.hexdigest()}


def write_sums(folder: Path, names: list[str], out: Path) -> None:
    """The sums of some files of a folder as one JSON object by name, on the disk. Raises OSError."""
    with out.open("w") as file:
        json.dump({name: file_sum(folder / name) for name in names}, file)
        file.flush()
        os.fsync(file.fileno())
