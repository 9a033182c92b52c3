"""Reads one Parquet or `datasets` source and leaves its records as JSON lines: `python -m learner.gateway.tables ORDER`, made by records.py.

ORDER is a JSON object: path, kind (parquet, saved, hub), split, subset, revision, columns (null: all), key (section named in messages),
identity (written as the first line), out. Ends with 2 and one line on stderr for a user's mistake.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from learner.process import complain
from protos.lifeline import die_with_parent
from protos.mistakes import one_line

_ROWS = 1024  # at a time
_PLAIN = (str, int, float, bool, type(None))
_EXTRA = "install the extra: pip install '.[data]' in a clone of headrace"


class _Mistake(Exception):
    """A line for the user; the libraries' own ValueErrors name no file."""


def main() -> int:
    die_with_parent(os.getppid())
    order: dict[str, Any] = json.loads(sys.argv[1])
    where = f"{order['key']}.prompts={order['path']}"
    try:
        _write(order, where)
    except ImportError as error:
        return complain(f"{where}: reading it needs a library that is not installed ({error}); {_EXTRA}")
    except _Mistake as error:
        return complain(one_line(error))
    except Exception as error:  # the edge of the process: whatever the libraries raise for a damaged file or an unreachable hub
        return complain(f"{where} cannot be read: {type(error).__name__}: {one_line(error)[:300]}; correct the path, id, split or revision")
    return 0


def _write(order: dict[str, Any], where: str) -> None:
    batches = _parquet(Path(order["path"]), order["columns"], where) if order["kind"] == "parquet" else _dataset(order, where)
    number = 0
    with Path(order["out"]).open("w", encoding="utf-8") as file:
        file.write(order["identity"] + "\n")
        for batch in batches:
            for values in batch:
                number += 1
                for name, value in values.items():
                    _check(value, f"{order['path']} record {number}: field {name!r}", order["key"])
                file.write(json.dumps(values, ensure_ascii=False) + "\n")


def _parquet(path: Path, columns: list[str] | None, where: str) -> Iterator[list[dict[str, Any]]]:
    import pyarrow.parquet as pq

    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise _Mistake(f"{where} holds no *.parquet file; give another folder")
    for file in files:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_ROWS, columns=_present(columns, parquet.schema_arrow.names)):
                yield batch.to_pylist()


def _dataset(order: dict[str, Any], where: str) -> Iterator[list[dict[str, Any]]]:
    import datasets

    datasets.disable_progress_bars()
    if order["kind"] == "hub":
        found: Any = datasets.load_dataset(order["path"], order["subset"] or None, split=order["split"] or "train", revision=order["revision"] or None)
    else:
        found = _split(datasets.load_from_disk(order["path"]), order, where)
    columns = _present(order["columns"], found.column_names)
    table = (found if columns is None else found.select_columns(columns)).with_format("arrow")
    for batch in table.iter(_ROWS):
        yield batch.to_pylist()


def _split(found: Any, order: dict[str, Any], where: str) -> Any:
    """The data set itself, or one of a dictionary of them."""
    wanted, key = order["split"], order["key"]
    if not isinstance(found, dict):
        if wanted and str(found.split) != wanted:
            raise _Mistake(f"{key}.split={wanted!r}: {where} is one data set ({found.split}) without splits; leave split out")
        return found
    if not wanted and len(found) > 1:
        raise _Mistake(f"{where} has the splits {', '.join(found)}; choose one with {key}.split")
    if wanted and wanted not in found:
        raise _Mistake(f"{key}.split={wanted!r} is none of the splits of {where}: {', '.join(found)}; choose one of these")
    return found[wanted or next(iter(found))]


def _present(columns: list[str] | None, names: list[str]) -> list[str] | None:
    """Those wanted that there are; what is missing is told by whoever reads the first record."""
    return None if columns is None else [name for name in names if name in columns]


def _check(value: Any, what: str, key: str) -> None:
    """Raises _Mistake for what JSON has no word for."""
    if isinstance(value, dict):
        for inner in value.values():
            _check(inner, what, key)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, what, key)
    elif not isinstance(value, _PLAIN):
        raise _Mistake(f"{what} holds a {type(value).__name__}, which scorers cannot get; choose what they need with {key}.fields, or convert it to text")


if __name__ == "__main__":
    sys.exit(main())
