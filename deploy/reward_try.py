"""Scores the lines of a file as a reward server would, without a server: what each scorer says, how long it took, and why it said nothing."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct

from deploy.counts import counted
from deploy.mistakes import Mistakes
from reward_server import wiring
from reward_server.config import RewardConfig
from reward_server.outcome import Outcome, Scored, Unscored
from reward_server.plane import Plane
from reward_server.scorer import Group

AT_ONCE = 128  # lines under way
_WIDTH = 32  # of what is shown of a completion
_LONGEST_WORDS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the file: a prompt and its completions. Example: `Line(number=1, prompt="1 + 1?", completions=("2",), fields={"answer": 2})`"""

    number: int  # from 1
    prompt: str
    completions: tuple[str, ...]  # several: a group
    fields: Mapping[str, Any]  # the whole record


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one scorer said of one line. Example: `Row(line=line, scorer="answer", outcomes=(Scored(value=1.0),), seconds=0.01)`"""

    line: Line
    scorer: str
    outcomes: tuple[Outcome, ...]  # one for each completion
    seconds: float  # wall clock, waiting included


def read(file: Path, *, prompt_field: str, completion_field: str) -> list[Line]:
    """The lines of a JSONL file. A list in the completion's field is a group. Raises Mistakes naming the line."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Mistakes([f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}; give the path of a JSONL file"]) from None
    lines = [_line(file, number, words, prompt_field, completion_field) for number, words in enumerate(text.splitlines(), 1) if words.strip()]
    if not lines:
        raise Mistakes([f"{file}: holds no lines; write one JSON object a line, for instance {{\"prompt\": \"1 + 1?\", \"completion\": \"2\", \"answer\": 2}}"])
    return lines


def _line(file: Path, number: int, words: str, prompt_field: str, completion_field: str) -> Line:
    try:
        record = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise Mistakes([f"{file} line {number}: not JSON ({error}); write one JSON object a line"]) from None
    if not isinstance(record, dict):
        raise Mistakes([f"{file} line {number}: holds {type(record).__name__}, not an object; write one JSON object a line"])
    given = record.get(completion_field)
    completions: list[Any] = given if isinstance(given, list) else [given]
    if not completions or not all(isinstance(each, str) for each in completions):
        raise Mistakes([f"{file} line {number}: field {completion_field!r} must be text, or a list of texts for a group; it is {given!r:.80}. --completion-field names another"])
    prompt = record.get(prompt_field, "")
    if not isinstance(prompt, str):
        raise Mistakes([f"{file} line {number}: field {prompt_field!r} must be text, it is {prompt!r:.80}; --prompt-field names another"])
    return Line(number=number, prompt=prompt, completions=tuple(completions), fields=record)


async def rows(config: RewardConfig, lines: Sequence[Line], names: Sequence[str]) -> list[Row]:
    """Every named scorer's rows, in the order of lines. Raises ValueError when scorers cannot be loaded."""
    plane = Plane(wiring.scorers(config, Path.cwd()), default=config.scorers[0].name, caches=wiring.caches(config.cache))
    room = asyncio.Semaphore(AT_ONCE)
    try:
        await plane.start()
        return await asyncio.gather(*(_row(plane, room, line, name) for line in lines for name in names))
    finally:
        await plane.stop()


async def _row(plane: Plane, room: asyncio.Semaphore, line: Line, name: str) -> Row:
    async with room:
        answered: asyncio.Future[tuple[Outcome, ...]] = asyncio.get_running_loop().create_future()
        fields = Struct()
        fields.update(dict(line.fields))
        began_s = time.monotonic()
        group = Group(owner=answered, prompt=line.prompt, completions=line.completions, fields=fields.SerializeToString(deterministic=True))
        plane.submit_group(name, group, answered.set_result)
        outcomes = await answered
        return Row(line=line, scorer=name, outcomes=outcomes, seconds=time.monotonic() - began_s)


def table(found: Sequence[Row], names: Sequence[str], most: int) -> Iterator[str]:
    """A line for each completion, at most so many; what was unscored; then a summary of each scorer."""
    by_line: dict[int, dict[str, Row]] = {}
    for row in found:
        by_line.setdefault(row.line.number, {})[row.scorer] = row
    heads: list[str] = ["line", "completion", *names]
    cells = [_cells(rows_of, place, names) for rows_of in by_line.values() for place in range(len(next(iter(rows_of.values())).line.completions))]
    shown = cells[:most]
    widths = [max(len(words[place]) for words in (heads, *shown)) for place in range(len(heads))]
    for words in (heads, *shown):
        yield "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()
    if len(cells) > most:
        yield f"... and {len(cells) - most} more (--most)"
    yield from _words(found, most)
    yield ""
    for name in names:
        yield _summary(name, [row for row in found if row.scorer == name])


def _cells(rows_of: Mapping[str, Row], place: int, names: Sequence[str]) -> list[str]:
    line = next(iter(rows_of.values())).line
    number = str(line.number) if len(line.completions) == 1 else f"{line.number}.{place}"
    words = " ".join(line.completions[place].split())
    return [number, words if len(words) <= _WIDTH else words[: _WIDTH - 1] + "…", *(_value(rows_of[name].outcomes[place]) for name in names)]


def _value(outcome: Outcome) -> str:
    return f"{outcome.value:.4g}" if isinstance(outcome, Scored) else f"unscored({outcome.reason})"


def _words(found: Sequence[Row], most: int) -> Iterator[str]:
    """Why something is unscored, each reason once."""
    seen: dict[tuple[str, str], int] = {}
    for row in found:
        for outcome in row.outcomes:
            if isinstance(outcome, Unscored):
                seen.setdefault((row.scorer, outcome.detail), row.line.number)
    for (scorer, detail), number in list(seen.items())[:most]:
        yield f"line {number}, {scorer}: {detail[:_LONGEST_WORDS]}"


def _summary(name: str, found: Sequence[Row]) -> str:
    outcomes = [outcome for row in found for outcome in row.outcomes]
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Scored)]
    reasons: Counter[str] = Counter(outcome.reason for outcome in outcomes if isinstance(outcome, Unscored))
    spread = f"mean {math.fsum(values) / len(values):.4g}, from {min(values):.4g} to {max(values):.4g}" if values else "no score"
    unscored = f"; unscored: {counted(reasons)}" if reasons else ""
    seconds = sorted(row.seconds for row in found)
    return f"{name}: {len(values)} of {len(outcomes)} scored, {spread}{unscored}; seconds: median {seconds[len(seconds) // 2]:.3g}, longest {seconds[-1]:.3g}"


def records(found: Sequence[Row]) -> Iterator[str]:
    """One JSON object for each line, scorer and completion."""
    for row in found:
        for place, outcome in enumerate(row.outcomes):
            said = {"score": outcome.value, "parts": dict(outcome.parts)} if isinstance(outcome, Scored) else {"unscored": outcome.reason, "detail": outcome.detail}
            yield json.dumps({"line": row.line.number, "sample": place, "scorer": row.scorer, **said, "seconds": round(row.seconds, 6)})
