"""A published snapshot as a Hugging Face folder, byte for byte, without gathering the model anywhere.

The snapshot's slices are runs of bytes of each tensor, and a safetensors file is a header followed by each tensor's bytes: so
exporting is copying ranges of files.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from protos.manifest.v1alpha1 import manifest_pb2

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # tokenizer, template, generation settings


def export(*, snapshot_dir: Path, model_dir: Path, out_dir: Path) -> None:
    """Writes out_dir: config.json with the dtype of what is saved, model.safetensors, and model_dir's tokenizer files.

    A folder already there is replaced once the new one is whole. Raises ValueError when slices do not cover a tensor.
    """
    manifest = manifest_pb2.Manifest.FromString((snapshot_dir / "manifest.bin").read_bytes())
    made = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    copy_companions(model_dir, made)
    write_config(model_dir, made, manifest.tensors[0].dtype)
    _write_tensors(snapshot_dir, made / "model.safetensors", manifest)
    shutil.rmtree(out_dir, ignore_errors=True)
    made.rename(out_dir)


def copy_companions(model_dir: Path, out_dir: Path) -> None:
    """Tokenizer, template and generation settings of a model, as they are."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.suffix in _COPIED and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out_dir / path.name)


def write_config(model_dir: Path, out_dir: Path, dtype: str) -> None:
    """The model's config.json, saying the dtype of what is saved."""
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    (out_dir / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_tensors(snapshot_dir: Path, path: Path, manifest: manifest_pb2.Manifest) -> None:
    header = json.dumps(_header(manifest)).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file, ExitStack() as stack:
        file.write(len(header).to_bytes(8, "little") + header)
        shards = {owner: stack.enter_context(_mapped(snapshot_dir / f"rank-{owner}.bin")) for owner in sorted({s.owner for s in manifest.slices})}
        for index, tensor in enumerate(manifest.tensors):
            for data in _content(manifest, index, shards):
                file.write(data)
            assert file.tell() == 8 + len(header) + _end(manifest, index), tensor.name
        file.flush()
        os.fsync(file.fileno())


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _content(manifest: manifest_pb2.Manifest, index: int, shards: Mapping[int, mmap.mmap]) -> Iterator[bytes]:
    """A tensor's bytes in order; one that is cut by columns is put together first."""

    def dense(piece: manifest_pb2.Slice) -> bytes:
        start = manifest.buckets[piece.bucket].file_offset + piece.bucket_offset
        return shards[piece.owner][start : start + piece.num_bytes]

    mine = [piece for piece in manifest.slices if piece.tensor == index]
    if all(piece.num_runs <= 1 for piece in mine):
        yield from map(dense, _pieces(manifest, index))
        return
    whole, filled = np.empty(_num_bytes(manifest.tensors[index]), dtype=np.uint8), 0
    for piece in mine:
        runs = np.frombuffer(dense(piece), dtype=np.uint8).reshape(max(1, piece.num_runs), -1)
        target = np.lib.stride_tricks.as_strided(whole[piece.tensor_offset :], runs.shape, (piece.stride_bytes or runs.shape[1], 1))
        target[:] = runs
        filled += runs.size
    if filled != whole.size:
        raise ValueError(f"snapshot of {manifest.tensors[index].name} has {filled} of {whole.size} bytes")
    yield whole.tobytes()


def _pieces(manifest: manifest_pb2.Manifest, index: int) -> Iterator[manifest_pb2.Slice]:
    """Slices of one tensor in order. Raises ValueError for a gap or an overlap."""
    reached = 0
    for piece in sorted((s for s in manifest.slices if s.tensor == index), key=lambda s: s.tensor_offset):
        if piece.tensor_offset != reached:
            raise ValueError(f"snapshot of {manifest.tensors[index].name} has a gap or overlap at byte {reached}: next slice starts at {piece.tensor_offset}")
        reached += piece.num_bytes
        yield piece
    if reached != _num_bytes(manifest.tensors[index]):
        raise ValueError(f"snapshot of {manifest.tensors[index].name} ends at byte {reached} of {_num_bytes(manifest.tensors[index])}")


def _num_bytes(tensor: manifest_pb2.Tensor) -> int:
    count = 4 if tensor.dtype == "float32" else 2
    for length in tensor.shape:
        count *= length
    return count


def _end(manifest: manifest_pb2.Manifest, index: int) -> int:
    return sum(_num_bytes(tensor) for tensor in manifest.tensors[: index + 1])


def _header(manifest: manifest_pb2.Manifest) -> dict[str, object]:
    header: dict[str, object] = {"__metadata__": {"format": "pt", "policy_step": str(manifest.policy_step)}}
    start = 0
    for tensor in manifest.tensors:
        end = start + _num_bytes(tensor)
        header[tensor.name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    return header
