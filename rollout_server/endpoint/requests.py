"""What a request asks for, out of its JSON. What cannot be done exactly is refused by name, never left out in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_server.engine import SamplingSpec

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "repetition_penalty": (1,), "min_p": (0,), "functions": ([],), "audio": (), "prediction": (),
}  # fmt: skip
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One request. Example: Wanted(messages=({"role": "user", "content": "hi"},), temperature=1.0, max_tokens=64)"""

    messages: tuple[Mapping[str, Any], ...] = ()  # of a chat
    prompt: str | tuple[int, ...] = ""  # of a completion: text, or ids
    tools: tuple[Any, ...] = ()
    model: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None  # None: what there is room for
    stops: tuple[str, ...] = ()  # texts that end an answer and are left out of it
    stream: bool = False
    include_usage: bool = False  # in a stream, a last chunk with the counts
    logprobs: bool = False
    session: str = ""

    def spec(self, max_new_tokens: int, stop_token_ids: tuple[int, ...], seed: int) -> SamplingSpec:
        """The distribution that the request asks for. Raises ValueError."""
        return SamplingSpec(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids, seed=seed if self.seed is None else self.seed
        )  # fmt: skip


def chat(body: Any) -> Wanted:
    """Raises ValueError naming the parameter."""
    messages = _object(body).get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects")
    if body.get("tool_choice") not in (None, "auto") and not (body.get("tool_choice") == "none" and not tools):
        raise ValueError(f"tool_choice={body['tool_choice']!r} cannot be kept to: the policy chooses; leave it out, or say auto")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise ValueError("response_format other than text cannot be kept to: the distribution is the model's own; leave it out")
    return Wanted(messages=tuple(_message(message) for message in messages), tools=tuple(tools), logprobs=_flag(body, "logprobs"), **_common(body, "max_completion_tokens", "max_tokens"))


def completion(body: Any) -> Wanted:
    """Raises ValueError naming the parameter."""
    prompt = _object(body).get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise ValueError("prompt must be one text or one list of token ids, not empty")
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise ValueError(f"logprobs={logprobs!r}: of the drawn token alone; say 0 or 1")
    return Wanted(prompt=prompt, logprobs=logprobs is not None and logprobs is not False, **_common(body, "max_tokens"))


def _common(body: dict[str, Any], *lengths: str) -> dict[str, Any]:
    for name, neutral in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ValueError(f"{name}={body[name]!r} is not supported: it would draw from another distribution, or several answers; leave it out")
    options = body.get("stream_options") or {}
    session = body.get("session") or ""
    if not isinstance(session, str):
        raise ValueError("session must be a text")
    return {
        "model": str(body.get("model") or ""),
        "temperature": _number(body, "temperature", 1.0),
        "top_p": _number(body, "top_p", 1.0),
        "top_k": max(0, _whole(body, "top_k", 0) or 0),
        "seed": _whole(body, "seed", None),
        "max_tokens": next((value for name in lengths if (value := _positive(body, name)) is not None), None),
        "stops": _stops(body.get("stop")),
        "stream": _flag(body, "stream"),
        "include_usage": bool(isinstance(options, dict) and options.get("include_usage")),
        "session": session,
    }


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def _message(message: Any) -> Mapping[str, Any]:
    """With its content as one text: of parts, those that are text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message has a role and a content, got {str(message)[:100]}")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise ValueError("parts of a message's content must be texts: the model reads nothing else")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"a message's content is a text or a list of parts, got {type(content).__name__}")
    return {**{key: value for key, value in message.items() if value is not None}, "content": content or ""}


def _stops(said: Any) -> tuple[str, ...]:
    stops = [said] if isinstance(said, str) else said or []
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"stop must be a text or at most {MAX_STOPS} of them, each of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise ValueError(f"{name} must be true or false, got {value!r:.100}")
    return bool(value)


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r:.100}")
    return float(value)


def _whole(body: dict[str, Any], name: str, default: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**62:
        raise ValueError(f"{name} must be a whole number, got {value!r:.100}")
    return value


def _positive(body: dict[str, Any], name: str) -> int | None:
    value = _whole(body, name, None)
    if value is not None and value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    return value
