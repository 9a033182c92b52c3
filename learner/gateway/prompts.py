"""Prompts of a run: read once, checked whole, and given out in an order that is a pure function of the position."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import xxhash

from learner.data_config import SourceConfig
from learner.gateway.records import Record, read_records

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task. text: the prompt before the template, suffix included (the last user message of a chat).

    messages: what the chat template gets, system message not included. fields: the record's other fields, for scorers.
    """

    prompt_id: str
    text: str
    messages: tuple[Message, ...]
    fields: dict[str, Any]


class PromptSet(Sequence[Prompt]):
    """The prompts of a data set by row. fingerprint: digest of ids, prompts and fields, in order."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = tuple(prompts)
        self.fingerprint = _fingerprint(self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, row: int) -> Prompt: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, row: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self._prompts[row]


def load_prompts(path: Path, source: SourceConfig | None = None, *, key: str = "data", cache: Path | None = None) -> PromptSet:
    """The prompts of a data set. source: how to read it, None: JSONL or Parquet with the fields' usual names.

    key: section that the source came from, for messages. cache: where converted records are kept (records.py), None: nowhere.
    Raises ValueError naming record, field and the way out for the first bad record, and for an empty set.
    """
    source = source or SourceConfig()
    pieces = _pieces(source.prompt_format, key)
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for record in read_records(path, source, key=key, columns=_columns(source, pieces), cache=cache):
        prompt = _prompt(record, source, pieces, key)
        if prompt.prompt_id in places:
            raise ValueError(f"{record.where}: id {prompt.prompt_id!r} was used on {places[prompt.prompt_id]} already; ids must be unique, or leave {key}.id_field empty")
        places[prompt.prompt_id] = record.where.removeprefix(f"{path} ")
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; give a file with one JSON object a line, or records")
    return PromptSet(prompts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOrder:
    """Which row the group with sequence number n gets: a pure function, so a restart needs no cursor but the ledger's next_seq.

    Each epoch is one permutation by (seed, epoch), or file order without shuffle. epochs: None goes on for ever.
    For instance 3 rows, no shuffle, 2 epochs: 0 1 2 0 1 2, then the end.
    """

    num_rows: int
    seed: int
    shuffle: bool
    epochs: int | None

    def row(self, position: int) -> int | None:
        """Row at a position from 0; None past the last epoch."""
        epoch, index = divmod(position, self.num_rows)
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return self.rows(epoch)[index]

    def rows(self, epoch: int) -> Sequence[int]:
        """All rows of one epoch in order."""
        return _permutation(self.num_rows, self.seed, epoch) if self.shuffle else range(self.num_rows)


def check_fingerprint(saved: str, fingerprint: str, where: str) -> None:
    """Raises ValueError when a run goes on with other prompts than it began with. Of several data sets: "name=fingerprint name=fingerprint"."""
    if saved != fingerprint:
        raise ValueError(
            f"{where} has fingerprint {fingerprint}, but this run began with {saved}: positions in the prompt order would mean "
            "other prompts; give the same data and fields, start a new run folder, or begin their passes anew with data.on_change=restart"
        )


@lru_cache(maxsize=32)  # of several data sets, this epoch's and the next
def _permutation(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    rows = list(range(num_rows))
    random.Random(f"{seed}:{epoch}").shuffle(rows)
    return tuple(rows)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    digest = xxhash.xxh3_64()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.messages, prompt.fields], sort_keys=True, ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


Piece = tuple[str, str]  # literal text, then the field after it; "": none


def _pieces(prompt_format: str, key: str) -> list[Piece]:
    """`prompt_format` taken apart. Raises ValueError where it is no text with {field} in it."""
    rule = f"{key}.prompt_format={prompt_format!r}: write {{field}} for a field and {{{{ for a brace"
    try:
        parts = list(string.Formatter().parse(prompt_format))
    except ValueError as error:
        raise ValueError(f"{rule} ({error})") from None
    if any(spec or conversion or name == "" for _, name, spec, conversion in parts):
        raise ValueError(f"{rule}; neither positions nor formats like {{field:5}} are understood")
    if prompt_format and not any(name for _, name, _, _ in parts):
        raise ValueError(f"{rule}; it names no field, so every prompt would be the same")
    return [(text, name or "") for text, name, _, _ in parts]


def _columns(source: SourceConfig, pieces: Sequence[Piece]) -> list[str] | None:
    """Columns of a table that are needed, sorted; None: all."""
    if source.fields is None:
        return None
    asked = {source.id_field, *source.fields.values(), *([name for _, name in pieces] if pieces else [source.prompt_field])} - {""}
    return sorted(asked | {name.split(".")[0] for name in asked})


def _field(record: Record, name: str, option: str) -> Any:
    """A field by its name, or else by dots through objects. Raises ValueError naming the option that asked for it."""
    if name in record.values:
        return record.values[name]
    value: Any = record.values
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{record.where}: no field {name!r} (it has {', '.join(map(repr, record.values))}); name the field with {option}")
        value = value[part]
    return value


def _prompt(record: Record, source: SourceConfig, pieces: Sequence[Piece], key: str) -> Prompt:
    where = record.where
    content = _filled(record, pieces, key) if pieces else _field(record, source.prompt_field, f"{key}.prompt_field")
    messages = _messages(where, source.prompt_field, content, source.suffix)
    prompt_id = _id(record, source.id_field, key)
    if source.fields is None:
        used = {source.prompt_field} if not pieces else set()
        fields = {name: value for name, value in record.values.items() if name not in used}
    else:
        fields = {name: _field(record, origin, f"{key}.fields.{name}") for name, origin in source.fields.items()}
    if isinstance(fields.get(source.id_field), int) and abs(fields[source.id_field]) > 2**53:
        fields[source.id_field] = prompt_id  # ids are often hashes, and nobody calculates with them
    _check_values(where, [fields, messages, prompt_id])
    return Prompt(prompt_id=prompt_id, text=messages[-1]["content"], messages=messages, fields=fields)


def _filled(record: Record, pieces: Sequence[Piece], key: str) -> str:
    """Raises ValueError for a field that is missing, or is no text or number."""
    filled = []
    for text, name in pieces:
        value = _field(record, name, f"{key}.prompt_format") if name else ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{record.where}: field {name!r} of {key}.prompt_format is {value!r}; only texts and numbers can stand in a prompt")
        filled.append(f"{text}{value}")
    return "".join(filled)


def _check_values(where: str, value: Any) -> None:
    """Raises ValueError for what would reach a scorer as something else, or not at all: records travel as doubles and UTF-8."""
    if isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_values(where, inner)
    elif isinstance(value, int) and abs(value) > 2**53:
        raise ValueError(f"{where}: the number {value if abs(value) < 10**40 else f'of {value.bit_length()} bits'} lies beyond 2**53, and numbers travel as doubles; write it as a string")
    elif isinstance(value, str) and not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: a string holds half of a surrogate pair, which is no character; correct {value[:40]!a}")


def _messages(where: str, field: str, value: Any, suffix: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{where}: field {field!r} is an empty string; give a prompt or remove the line")
        return ({"role": "user", "content": value + suffix},)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: field {field!r} is a {type(value).__name__}; give a string, or a list of chat messages that is not empty")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"{where}: message {index} of field {field!r} is {message!r}; give objects with strings `role` and `content`")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _id(record: Record, id_field: str, key: str) -> str:
    if not id_field:
        return str(record.number)
    value = _field(record, id_field, f"{key}.id_field")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{record.where}: id field {id_field!r} is {value!r}; give a string or an integer, or leave {key}.id_field empty to use the record's number")
    return str(value)
