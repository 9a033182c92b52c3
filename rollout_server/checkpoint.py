"""What a Hugging Face folder holds, read from its safetensors headers alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from protos.manifest.v1alpha1 import manifest_pb2
from protos.rpc import CHUNK_BYTES

TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' word to torch's


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor as stored. Example: `TensorSpec(shape=(259, 64), dtype="F32")`."""

    shape: tuple[int, ...]
    dtype: str  # safetensors' word: "F32", "BF16", "F16"


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of one safetensors file (8 bytes little-endian length, then JSON; safetensors' README, "Format").

    Raises ValueError when the file is no safetensors.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= path.stat().st_size - 8:
            raise ValueError(f"{path} is not a safetensors file: its header would have {length} bytes of {path.stat().st_size}")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def read_specs(folder: Path) -> dict[str, TensorSpec]:
    """Tensors of all *.safetensors of a folder by name, the tied head left out.

    Raises ValueError when there is no such file.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors; convert the model to safetensors first")
    specs = {
        name: TensorSpec(shape=tuple(entry["shape"]), dtype=entry["dtype"])
        for path in files
        for name, entry in read_header(path).items()
        if not name.endswith("rotary_emb.inv_freq")  # a buffer that old checkpoints carry; computed, never loaded
    }
    if is_tied(folder):
        specs.pop("lm_head.weight", None)
    return specs


def check_tied(folder: Path) -> None:
    """Raises ValueError for a folder whose config ties head and embedding while its files hold two different ones: engines pick one or the other."""
    if not is_tied(folder):
        return
    stored_names = {name: path for path in sorted(folder.glob("*.safetensors")) for name in read_header(path)}
    embedding = next((name for name in stored_names if name.endswith("embed_tokens.weight")), "")
    if "lm_head.weight" in stored_names and embedding and not stored(folder, embedding).equal(stored(folder, "lm_head.weight")):
        raise ValueError(f"{folder}: config.json ties lm_head.weight to {embedding}, but the files hold two different tensors; remove lm_head.weight, or set tie_word_embeddings to false")


def expected_tensors(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor that a full update of this model holds. Raises ValueError as check_tied."""
    check_tied(folder)
    return [(name, spec.shape) for name, spec in read_specs(folder).items()]


def is_tied(folder: Path) -> bool:
    """Whether config.json says that head and embedding are one tensor. Where it is silent, a stored head is a tensor of its own."""
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))


def stored(folder: Path, name: str) -> Any:
    """One tensor of a folder. Raises KeyError for one that it lacks."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        if name in read_header(path):
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
    raise KeyError(f"{folder} holds no tensor {name}")


def folder_update(folder: Path, version: int) -> tuple[manifest_pb2.Manifest, Iterator[tuple[int, int, bytes]]]:
    """A folder as a weight update: its manifest (one bucket a tensor), and its bytes as (bucket, offset, data) in order.

    Raises ValueError for a folder without safetensors or with a dtype that no engine serves. Reads every byte once for
    the digests, and once more while the chunks are taken.
    """
    places = _places(folder)
    manifest = manifest_pb2.Manifest(version=version)
    for index, (name, place) in enumerate(places.items()):
        manifest.tensors.add(name=name, shape=place.spec.shape, dtype=TORCH_DTYPES[place.spec.dtype])
        manifest.buckets.add(num_bytes=place.num_bytes)
        digest = xxhash.xxh3_64()
        for _, data in place.chunks():
            digest.update(data)
        manifest.slices.add(tensor=index, num_bytes=place.num_bytes, bucket=index, digest=digest.intdigest())
    chunks = ((index, offset, data) for index, place in enumerate(places.values()) for offset, data in place.chunks())
    return manifest, chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor's bytes lie: `num_bytes` of `path` from `start` on."""

    spec: TensorSpec
    path: Path
    start: int
    num_bytes: int

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """(offset inside the tensor, up to CHUNK_BYTES)."""
        with self.path.open("rb") as file:
            for offset in range(0, self.num_bytes, CHUNK_BYTES):
                file.seek(self.start + offset)
                yield offset, file.read(min(CHUNK_BYTES, self.num_bytes - offset))


def _places(folder: Path) -> dict[str, _Place]:
    wanted = read_specs(folder)
    unknown = [f"{name} is {spec.dtype}" for name, spec in wanted.items() if spec.dtype not in TORCH_DTYPES]
    if unknown:
        raise ValueError(f"{folder} cannot be served: {'; '.join(unknown[:8])}; known are {', '.join(TORCH_DTYPES)}")
    places = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            data_start = 8 + struct.unpack("<Q", file.read(8))[0]
        for name, entry in read_header(path).items():
            if name in wanted:
                start, end = entry["data_offsets"]
                places[name] = _Place(spec=wanted[name], path=path, start=data_start + start, num_bytes=end - start)
    return places
