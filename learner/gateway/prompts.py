"""Prompts of a run: read once from JSONL, checked whole, and given out in an order that is a pure function of the position."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import xxhash

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


def load_prompts(path: Path, *, prompt_field: str = "prompt", id_field: str = "", suffix: str = "") -> PromptSet:
    """Reads a JSONL file. Raises ValueError naming line, field and the way out for the first bad line, and for an empty set."""
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        prompt = _parse(path, number, line, prompt_field, id_field, suffix)
        if prompt.prompt_id in lines:
            raise ValueError(f"{path} line {number}: id {prompt.prompt_id!r} was used on line {lines[prompt.prompt_id]} already; ids must be unique, or leave data.id_field empty")
        lines[prompt.prompt_id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; give a file with one JSON object a line")
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
        return _permutation(self.num_rows, self.seed, epoch)[index] if self.shuffle else index

    @property
    def num_positions(self) -> float:
        """Positions before the end; infinite without a bound on epochs."""
        return math.inf if self.epochs is None else self.epochs * self.num_rows


def check_fingerprint(saved: str, fingerprint: str, path: Path) -> None:
    """Raises ValueError when a run goes on with other prompts than it began with."""
    if saved != fingerprint:
        raise ValueError(
            f"data.prompts={path} has fingerprint {fingerprint}, but this run began with {saved}: positions in the prompt order would mean "
            "other prompts; give the same file and fields, or start a new run folder"
        )


@lru_cache(maxsize=4)
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise ValueError(f"data.prompts={path} does not exist; give a JSONL file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"data.prompts={path} is not UTF-8 at byte {error.start}; convert it") from None


def _parse(path: Path, number: int, line: str, prompt_field: str, id_field: str, suffix: str) -> Prompt:
    where = f"{path} line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a JSON {type(record).__name__}, not an object; write one JSON object a line")
    if prompt_field not in record:
        raise ValueError(f"{where}: no field {prompt_field!r} (it has {', '.join(map(repr, record))}); name the field with data.prompt_field")
    messages = _messages(where, prompt_field, record.pop(prompt_field), suffix)
    prompt_id = _id(where, id_field, record, number)
    if isinstance(record.get(id_field), int) and abs(record[id_field]) > 2**53:
        record[id_field] = prompt_id  # ids are often hashes, and nobody calculates with them
    _check_values(where, [record, messages, prompt_id])
    return Prompt(prompt_id=prompt_id, text=messages[-1]["content"], messages=messages, fields=record)


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


def _id(where: str, id_field: str, record: dict[str, Any], number: int) -> str:
    if not id_field:
        return str(number)
    value = record.get(id_field)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{where}: id field {id_field!r} is {value!r}; give a string or an integer, or leave data.id_field empty to use line numbers")
    return str(value)
