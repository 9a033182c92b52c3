"""Whether the tensors of a cut are all there: safetensors files, and files of torch's distributed checkpoint. Without torch.

A distributed checkpoint is `.metadata` (a pickle: which bytes of which file hold what) and `*.distcp`, where a tensor is a zip archive with a
CRC-32 for each member. The pickle is read with nothing but plain containers: every class in it becomes an inert record.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PLAIN = {("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "list"), ("builtins", "dict"), ("builtins", "tuple")}


class Inert:
    """Stands for an object of any class: what it was made with, and its fields."""

    def __new__(cls, *arguments: Any, **_: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Reader(pickle.Unpickler):
    """Nothing that a pickle names is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        return type(name, (Inert,), {})


def complaints(folder: Path) -> Iterator[str]:
    """What is missing or damaged in a cut's folder, a line each; none: it is whole."""
    metadata = folder / ".metadata"
    tensors = sorted(folder.rglob("*.safetensors"))
    if not metadata.is_file() and not tensors:
        yield "holds neither .metadata of a distributed checkpoint nor *.safetensors: there are no weights in it"
    if metadata.is_file():
        yield from _distributed(folder, metadata)
    for path in tensors:
        yield from _safetensors(path)


def _distributed(folder: Path, metadata: Path) -> Iterator[str]:
    try:
        content = _Reader(io.BytesIO(metadata.read_bytes())).load()
        places = [(index.fqn, place.relative_path, place.offset, place.length) for index, place in content.storage_data.items()]
        names = set(content.state_dict_metadata)
    except Exception as error:  # a damaged pickle raises anything
        yield f".metadata cannot be read: {type(error).__name__}: {error}"
        return
    if missing := sorted(names - {name for name, *_ in places}):
        yield f".metadata says nowhere where {', '.join(missing[:3])} lie ({len(missing)} names)"
    for name, file, offset, length in places:
        complaint = _piece(folder / file, offset, length)
        if complaint:
            yield f"{file}: {name} at bytes {offset} to {offset + length}: {complaint}"


def _piece(path: Path, offset: int, length: int) -> str:
    if not path.is_file():
        return "the file is missing"
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) < length:
        return f"the file ends at {path.stat().st_size}"
    if not data.startswith(b"PK"):
        return ""  # raw bytes, without a checksum
    try:
        broken = zipfile.ZipFile(io.BytesIO(data)).testzip()
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        return f"not a whole archive: {error}"
    return f"the checksum of {broken} does not match" if broken else ""


def _safetensors(path: Path) -> Iterator[str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        num_header = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(num_header)) if num_header < size else None
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"] if header else None
        except (ValueError, KeyError, TypeError, AttributeError):
            ends = None
    if ends is None:
        yield f"{path.name}: its header cannot be read"
    elif size != 8 + num_header + max(ends, default=0):
        yield f"{path.name}: {size} bytes, its header asks for {8 + num_header + max(ends, default=0)}"
