"""Versions on a shared path, for fleets behind a firewall: the learner writes, replicas look.

    ROOT/v7/rank-0.bin, rank-1.bin ...    as in the snapshot
    ROOT/v7/manifest.bin                  as announced
    ROOT/v7/delta-6.bin                   where there is one: DeltaParts that lead here from version 6, each with its length before it
    ROOT/v7/index.msgpack                 last: size and xxh3_64 of every file above. A folder without it is no version

ROOT is a folder (files are fsynced and renamed into place) or any URL that fsspec knows, for instance s3://bucket/run (an object is
there whole or not at all). A reader takes a file only with the size and digest of the index (a shared file system may show the index
before the bytes).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import fsspec
import msgpack
import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.weights.errors import TransferError
from protos.weights.history import Step

SCHEMA = 1
INDEX, MANIFEST = "index.msgpack", "manifest.bin"
_READ_BYTES = 4 << 20
_VERSION = re.compile(r"v(\d+)")


class Place:
    """A shared path. Example: Place("/mnt/shared/run1"), Place("s3://bucket/run1"). Raises ValueError for a URL that fsspec does not know."""

    def __init__(self, url: str) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ValueError, ImportError) as error:
            raise ValueError(f"push.folder={url}: {error}; give a folder, or a URL of an installed fsspec file system") from None
        self._local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def versions(self) -> list[int]:
        """Whole versions, oldest first."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return []
        names = [str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self._root, detail=False)]
        found = [int(match[1]) for match in map(_VERSION.fullmatch, names) if match]
        return sorted(version for version in found if self._fs.exists(self._path(version, INDEX)))

    def write(self, version: int, name: str, content: Iterable[bytes]) -> tuple[int, int]:
        """A whole file or none; (size, xxh3_64)."""
        digest, size, path = xxhash.xxh3_64(), 0, self._path(version, name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        part = f"{path}.{os.getpid()}" if self._local else path
        with self._fs.open(part, "wb") as file:
            for data in content:
                file.write(data)
                digest.update(data)
                size += len(data)
            if self._local:
                file.flush()
                os.fsync(file.fileno())
        if self._local:
            os.replace(part, path)
            _sync_folder(Path(path).parent)
        return size, digest.intdigest()

    def read(self, version: int, name: str) -> Iterator[bytes]:
        """The file's bytes. Raises TransferError for one that is not there."""
        try:
            with self._fs.open(self._path(version, name), "rb") as file:
                while data := file.read(_READ_BYTES):
                    yield bytes(data)
        except FileNotFoundError:
            raise TransferError(f"version {version} on the shared path: {name} is not there; it is looked for again later") from None

    def remove(self, version: int) -> None:
        """The index first: what is being removed is no version any more."""
        for name in (INDEX, ""):
            with suppress(FileNotFoundError):
                self._fs.rm(self._path(version, name).rstrip("/"), recursive=not name)

    def _path(self, version: int, name: str) -> str:
        return f"{self._root}/v{version}/{name}"


def publish(place: Place, snapshot: Path, manifest: manifest_pb2.Manifest, *, step: Step | None = None, keep: int = 3) -> None:
    """Writes a snapshot folder's version, then its index; then removes all but the newest `keep`. Raises OSError, FileNotFoundError for a
    snapshot that is gone."""
    version = manifest.version
    files = {}
    for owner in sorted({bucket.owner for bucket in manifest.buckets}):
        files[f"rank-{owner}.bin"] = place.write(version, f"rank-{owner}.bin", _content(snapshot / f"rank-{owner}.bin"))
    files[MANIFEST] = place.write(version, MANIFEST, [manifest.SerializeToString()])
    if step is not None and step.to_version == version:
        name = f"delta-{step.from_version}.bin"
        files[name] = place.write(version, name, _lines(step.parts))
    place.write(version, INDEX, [msgpack.packb({"schema": SCHEMA, "version": version, "files": {name: list(facts) for name, facts in files.items()}})])
    for old in place.versions()[:-keep]:
        place.remove(old)


def read_index(place: Place, version: int) -> dict[str, tuple[int, int]]:
    """Name to (size, xxh3_64) of every file of a version. Raises TransferError for an index that is cut off or of another schema."""
    data = b"".join(place.read(version, INDEX))
    try:
        index = cast(dict[str, Any], msgpack.unpackb(data))
        assert index["schema"] == SCHEMA and index["version"] == version
        return {name: (size, digest) for name, (size, digest) in index["files"].items()}
    except Exception as error:  # whatever a half-written or foreign file makes msgpack raise
        raise TransferError(f"version {version} on the shared path: {INDEX} cannot be read ({type(error).__name__}); it is looked for again later") from None


def checked(place: Place, version: int, name: str, index: dict[str, tuple[int, int]], take: Callable[[int, bytes], None]) -> None:
    """Hands a file's bytes to take(offset, data), and afterwards raises TransferError where size or digest are not those of the index."""
    digest, at = xxhash.xxh3_64(), 0
    size, expected = index[name]
    for data in place.read(version, name):
        if at + len(data) > size:
            break
        take(at, data)
        digest.update(data)
        at += len(data)
    if at != size or digest.intdigest() != expected:
        raise TransferError(f"version {version} on the shared path: {name} has {at} of {size} bytes, or others than the index says; it is not loaded, and looked at again later")


def read_parts(place: Place, version: int, name: str, index: dict[str, tuple[int, int]]) -> list[manifest_pb2.DeltaPart]:
    """The parts of a delta file, checked as a whole."""
    data = bytearray(index[name][0])

    def take(at: int, piece: bytes) -> None:
        data[at : at + len(piece)] = piece

    checked(place, version, name, index, take)
    parts, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        parts.append(manifest_pb2.DeltaPart.FromString(bytes(data[at + 4 : at + 4 + size])))
        at += 4 + size
    return parts


def _lines(parts: Iterable[manifest_pb2.DeltaPart]) -> Iterator[bytes]:
    for part in parts:
        data = part.SerializeToString()
        yield len(data).to_bytes(4, "little") + data


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            yield data


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
