"""What an HTTP endpoint is sent and answers (docs/rewards.md): one schema, written as JSON or msgpack. Pure.

Request:  {"schema": 1, "items": [{"id": "0", "prompt": "...", "completion": "...", "fields": {...}}]}
Response: {"scores": [{"id": "0", "score": 0.5, "parts": {"style": 0.5}}, {"id": "1", "unscored": "why"}]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgpack

from reward_server import fields
from reward_server.endpoints.failures import Failed
from reward_server.endpoints.waiting import Call
from reward_server.outcome import Outcome, Unscored, checked, clean

SCHEMA = 1
Format = Literal["json", "msgpack"]


def encode(calls: Sequence[Call], form: Format) -> bytes:
    """The body that asks for these calls; their ids are their places. Raises Failed for numbers that JSON has not."""
    items = [
        {"id": str(place), "prompt": call.prompt, "completion": call.completion, "fields": fields.decode(call.fields)}
        for place, call in enumerate(calls)
    ]
    content = {"schema": SCHEMA, "items": items}
    if form == "msgpack":
        packed: bytes = msgpack.packb(content)
        return packed
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        raise Failed("refused", "a field of the record is NaN or infinite, which JSON cannot say; remove it, or set format: msgpack", is_retryable=False) from None


def decode(body: bytes, num_items: int, form: Format) -> list[Outcome]:
    """An outcome for each item. Raises Failed for a body that is none of ours; a single bad answer is that item's outcome."""
    answers = _answers(_content(body, form))
    return [_outcome(answers.get(str(place))) for place in range(num_items)]


def _content(body: bytes, form: Format) -> Any:
    try:
        return msgpack.unpackb(body) if form == "msgpack" else json.loads(body)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        beginning = clean(body[:80].decode(errors="replace"))
        raise Failed("error", f"the answer is no {form} ({error}): {beginning!r}", is_retryable=False) from None


def _answers(content: Any) -> dict[str, Any]:
    scores = content.get("scores") if isinstance(content, dict) else None
    if not isinstance(scores, list) or not all(isinstance(each, dict) for each in scores):
        raise Failed("error", 'the answer must be {"scores": [{"id": ..., "score": ...}, ...]}, it is ' + clean(repr(content)[:200]), is_retryable=False)
    answers = {str(each.get("id")): each for each in scores}
    if len(answers) != len(scores):
        raise Failed("error", "the answer has two scores with one id", is_retryable=False)
    return answers


def _outcome(answer: dict[str, Any] | None) -> Outcome:
    if answer is None:
        return Unscored("the endpoint answered other items and left this one out", "error")
    if "unscored" in answer:
        return checked(Unscored(str(answer["unscored"]), answer.get("reason", "refused")))
    if "score" not in answer:
        return Unscored(f'an answer with neither "score" nor "unscored", but {sorted(map(str, answer))[:10]}', "error")
    parts = answer.get("parts") or {}
    if not isinstance(parts, dict):
        return Unscored(f'"parts" must map names to numbers, it is of type {type(parts).__name__}', "error")
    return checked((answer["score"], parts))
