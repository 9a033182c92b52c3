"""The records of a data set, whatever it is kept in, as plain JSON values with the place where each stands.

JSONL is read here. Parquet and data sets of the `datasets` library are read by a process of its own (tables.py) that leaves a JSONL file
behind: what it imports would stay in the gateway for the whole run otherwise. With a `cache` that file is kept, and used again as long as
the files, or the hub's id and revision, are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from learner.data_config import SourceConfig

Kind = Literal["jsonl", "parquet", "saved", "hub"]
_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_SAVED = ("dataset_info.json", "dataset_dict.json")  # what `save_to_disk` leaves in its folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record. Example: Record(where="train.jsonl line 3", number=3, values={"prompt": "1+1", "answer": "2"})"""

    where: str  # for messages
    number: int  # of the line, or of the record, from 1
    values: dict[str, Any]


def kind_of(path: Path, source: SourceConfig, *, key: str = "data") -> Kind:
    """What `path` is. key: section that the source came from, for messages. Raises ValueError where that cannot be told or does not exist."""
    if source.format == "hub":
        return "hub"
    if not path.exists():
        raise ValueError(f"{key}.prompts={path} does not exist; give a JSONL or Parquet file, a folder that `datasets` saved, or with {key}.format=hub an id on the hub")
    if source.format != "auto":
        return source.format
    if path.is_dir():
        found: list[Kind] = [*(["saved"] if any((path / name).is_file() for name in _SAVED) else []), *(["parquet"] if any(path.glob("*.parquet")) else [])]  # type: ignore[list-item]
        if len(found) == 1:
            return found[0]
        raise ValueError(f"{key}.prompts={path} is a folder with {'both' if found else 'neither'} a saved data set {'and' if found else 'nor'} Parquet files; {f'say which with {key}.format' if found else 'give one that has either'}")
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    raise ValueError(f"{key}.prompts={path}: the ending {path.suffix!r} is none of {', '.join(_SUFFIXES)}; set {key}.format, or convert it")


def read_records(path: Path, source: SourceConfig, *, key: str = "data", columns: list[str] | None = None, cache: Path | None = None) -> Iterator[Record]:
    """Every record in order. columns: the fields that are needed, None: all. Raises ValueError, one line, for what cannot be read."""
    kind = kind_of(path, source, key=key)
    if kind == "jsonl":
        if source.split:
            raise ValueError(f"{key}.split={source.split!r}: {path} is JSONL, which has no splits; name the file of that split")
        yield from _read_jsonl(path, f"{path} line", key)
        return
    if cache is not None:
        yield from _read_jsonl(_converted(path, kind, source, key, columns, cache), f"{path} record", key, first_line=2)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-records-") as folder:
        yield from _read_jsonl(_converted(path, kind, source, key, columns, Path(folder) / "records.jsonl"), f"{path} record", key, first_line=2)


def _read_jsonl(path: Path, where: str, key: str, *, first_line: int = 1) -> Iterator[Record]:
    """first_line: lines before it are no records, and it has number 1."""
    for index, line in enumerate(_lines(path, key), start=1):
        number = index - first_line + 1
        if number < 1 or not line.strip():
            continue
        place = f"{where} {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
        if not isinstance(values, dict):
            raise ValueError(f"{place}: a JSON {type(values).__name__}, not an object; write one JSON object a line")
        yield Record(where=place, number=number, values=values)


def _lines(path: Path, key: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}.prompts={path} is not UTF-8 at byte {error.start}; convert it") from None
    except OSError as error:
        raise ValueError(f"{key}.prompts={path} cannot be read: {error.strerror}; give a JSONL file") from None


def _converted(path: Path, kind: Kind, source: SourceConfig, key: str, columns: list[str] | None, out: Path) -> Path:
    """A JSONL file whose first line says what it was made of."""
    identity = json.dumps({"path": str(path), "kind": kind, "split": source.split, "subset": source.subset, "revision": source.revision, "columns": columns, "files": _stamps(path, kind)})
    if _first_line(out) == identity:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.{os.getpid()}")
    try:
        _convert({"path": str(path), "kind": kind, "split": source.split, "subset": source.subset, "revision": source.revision, "columns": columns, "key": key, "identity": identity, "out": str(part)}, source.load_s, key)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def _convert(order: dict[str, Any], limit_s: float, key: str) -> None:
    try:
        done = subprocess.run([sys.executable, "-m", "learner.gateway.tables", json.dumps(order)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{key}.prompts={order['path']} was not read within {key}.load_s={limit_s:g}; raise it, or download the data set before") from None
    if done.returncode:
        told = [line.removeprefix("headrace: ") for line in done.stderr.splitlines() if line.startswith("headrace: ")]
        last = " ".join(done.stderr.split())[-300:]
        raise ValueError(told[0] if told else f"{key}.prompts={order['path']} cannot be read: the reading process ended with {done.returncode} ({last}); convert the data set to JSONL")


def _stamps(path: Path, kind: Kind) -> list[list[Any]]:
    """Name, size and time of change of every file; none for an id on the hub, whose revision stands for it."""
    if kind == "hub":
        return []
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _first_line(path: Path) -> str:
    """Empty where there is no such file, or it is no text."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().rstrip("\n")
    except (OSError, UnicodeDecodeError):
        return ""
