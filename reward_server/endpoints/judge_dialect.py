"""Asking a language model over the chat endpoint that OpenAI's servers and many others have: POST BASE/chat/completions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from reward_server import fields
from reward_server.endpoints.failures import Failed
from reward_server.endpoints.http_dialect import HttpClient
from reward_server.endpoints.waiting import Call
from reward_server.judge_config import JudgeConfig
from reward_server.judging.verdict import VerdictRule
from reward_server.outcome import Outcome, Scored
from reward_server.templates import Template

NAMES = frozenset({"prompt", "completion", "fields", "fence"})


class JudgeDialect:
    """One question a request. An answer without a valid verdict is a failure that may pass: asked again like any other.

    Example: `JudgeDialect(HttpClient(token="s3cret"), config)`. Raises ValueError for a template that will not do.
    """

    def __init__(self, client: HttpClient, config: JudgeConfig) -> None:
        self._client = client
        self._config = config
        self._template = Template(config.template, names=NAMES)
        self._rule = VerdictRule(tag=config.tag, low=config.low, high=config.high, choices=config.choices)

    async def ask(self, address: str, calls: Sequence[Call], limit_s: float) -> list[Outcome]:
        """See Dialect."""
        (call,) = calls
        body = json.dumps(self._body(call)).encode()
        answer = await self._client.post(f"{address.rstrip('/')}/chat/completions", body, content_type="application/json", limit_s=limit_s)
        try:
            verdict = self._rule.read(_content(answer))
        except ValueError as error:
            raise Failed("error", f"malformed verdict: {error}", is_retryable=True) from None
        if self._config.scale and not self._config.choices:
            verdict = (verdict - self._config.low) / (self._config.high - self._config.low)
        return [Scored(value=verdict)]

    async def close(self) -> None:
        await self._client.close()

    def _body(self, call: Call) -> dict[str, Any]:
        """Raises Failed for an item that cannot be asked about."""
        if len(call.prompt) + len(call.completion) > self._config.max_chars:
            raise Failed("refused", f"prompt and completion have {len(call.prompt) + len(call.completion)} characters, more than max_chars={self._config.max_chars}", is_retryable=False)
        try:
            asked = self._template.text(prompt=call.prompt, completion=call.completion, fields=fields.decode(call.fields), fence=secrets.token_hex(8))
        except ValueError as error:
            raise Failed("refused", str(error), is_retryable=False) from None
        messages = [{"role": "system", "content": self._config.system}] if self._config.system else []
        return {
            **self._config.extra,
            "model": self._config.model,
            "messages": [*messages, {"role": "user", "content": asked}],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }


def _content(answer: bytes) -> str:
    """The text of the first choice. Raises ValueError for an answer of another shape, and one that was cut."""
    try:
        choice = json.loads(answer)["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"the body is no chat completion: {answer[:100]!r}") from None
    if not isinstance(content, str):
        raise ValueError(f"the message's content is {type(content).__name__}, not text")
    if choice.get("finish_reason") == "length":
        raise ValueError("the answer was cut at max_tokens; raise it")
    return content
