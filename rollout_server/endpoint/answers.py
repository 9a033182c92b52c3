"""Answers in the shapes of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_server.endpoint.tools import ToolCall

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One answer as its caller sees it. Example: Said(id="chatcmpl-1", created=0, model="m", text="12", finish="stop", num_prompt=8, num_drawn=3)"""

    id: str
    created: int  # seconds since the epoch
    model: str
    text: str
    finish: str  # stop, length, tool_calls
    num_prompt: int  # tokens
    num_drawn: int
    calls: tuple[ToolCall, ...] = ()
    pieces: Sequence[tuple[str, float]] = ()  # text and log-prob of each token, where asked for
    extra: Json = field(default_factory=dict)  # session, turn


def message(text: str, calls: Sequence[ToolCall], answer_id: str) -> Json:
    """The assistant's message. Ids of calls follow from the answer's."""
    made: Json = {"role": "assistant", "content": text}
    if calls:
        made["tool_calls"] = [{"id": f"call-{answer_id}-{place}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for place, call in enumerate(calls)]
        made["content"] = text or None
    return made


def chat(said: Said) -> Json:
    choice: Json = {"index": 0, "message": message(said.text, said.calls, said.id), "finish_reason": said.finish, "logprobs": _chat_logprobs(said.pieces)}
    return {"id": said.id, "object": "chat.completion", "created": said.created, "model": said.model, "choices": [choice], "usage": usage(said), "headrace": said.extra}


def completion(said: Said) -> Json:
    logprobs = None
    if said.pieces:
        logprobs = {"tokens": [text for text, _ in said.pieces], "token_logprobs": [value for _, value in said.pieces], "top_logprobs": None, "text_offset": None}
    choice: Json = {"index": 0, "text": said.text, "finish_reason": said.finish, "logprobs": logprobs}
    return {"id": said.id, "object": "text_completion", "created": said.created, "model": said.model, "choices": [choice], "usage": usage(said), "headrace": said.extra}


def chunk(answer_id: str, created: int, model: str, *, is_chat: bool, text: str | None = None, first: bool = False, finish: str | None = None, calls: Sequence[Json] = ()) -> Json:
    """A part of a streamed answer."""
    if not is_chat:
        return {"id": answer_id, "object": "text_completion", "created": created, "model": model, "choices": [{"index": 0, "text": text or "", "finish_reason": finish, "logprobs": None}]}
    delta: Json = {**({"role": "assistant"} if first else {}), **({"content": text} if text is not None else {}), **({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]} if calls else {})}
    return {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}


def usage(said: Said) -> Json:
    return {"prompt_tokens": said.num_prompt, "completion_tokens": said.num_drawn, "total_tokens": said.num_prompt + said.num_drawn}


def error(text: str, kind: str, code: str | None = None) -> Json:
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def models(name: str) -> Json:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "headrace"}]}


def _chat_logprobs(pieces: Sequence[tuple[str, float]]) -> Json | None:
    if not pieces:
        return None
    return {"content": [{"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pieces], "refusal": None}
