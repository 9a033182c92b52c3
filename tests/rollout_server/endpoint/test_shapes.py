"""Requests in, answers out, calls of tools: pure parts of the endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_server.endpoint import requests
from rollout_server.endpoint.answering import KEPT_IDS, Growing, before_stop
from rollout_server.endpoint.tools import ToolCall, parse
from rollout_server.tokens import Tokens


def test_calls_of_tools_are_found_and_mistakes_stay_in_the_text() -> None:
    text = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "f"}</tool_call>'
    assert parse(text, "hermes") == ("so ", (ToolCall(name="add", arguments='{"a": 1}'), ToolCall(name="f", arguments="{}")))
    assert parse(text, "none") == (text, ())
    for broken in ("<tool_call>{</tool_call>", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>[1]</tool_call>", "<tool_call>{}", "plain\n"):
        assert parse(broken, "hermes") == (broken, ())


def test_a_text_ends_before_its_first_stop() -> None:
    assert before_stop("ab|c;d", (";", "|")) == "ab" and before_stop("abc", ("x",)) == "abc" and before_stop("abc", ()) == "abc"


def test_a_growing_text_is_that_of_all_its_ids(tiny_model: Path) -> None:
    tokens = Tokens(tiny_model)
    ids = tokens.more_ids("aé€😀" * 40 + "b")
    growing = Growing(tokens)
    assert [growing.with_one(token) for token in ids] == [tokens.text(ids[: end + 1]) for end in range(len(ids))]
    assert len(growing._ids) <= 2 * KEPT_IDS + 4  # what is decoded again stays short


def test_a_chat_request_is_read_as_it_is() -> None:
    body: dict[str, Any] = {
        "model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        "temperature": 0.5, "max_completion_tokens": 7, "stop": "x", "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "session": "s", "n": 1, "frequency_penalty": 0,
    }  # fmt: skip
    wanted = requests.chat(body)
    assert [m["content"] for m in wanted.messages] == ["ab", ""] and wanted.messages[1]["tool_calls"] == [{"id": "1"}]
    assert (wanted.temperature, wanted.max_tokens, wanted.stops, wanted.stream, wanted.include_usage, wanted.logprobs, wanted.session) == (0.5, 7, ("x",), True, True, True, "s")
    assert requests.completion({"prompt": [[5, 6]], "logprobs": 1}).prompt == (5, 6) and requests.completion({"prompt": ["a"]}).prompt == "a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs=3"),
        ({"response_format": {"type": "json_object"}}, "response_format other than text"),
        ({"tool_choice": "required"}, "tool_choice='required'"),
        ({"messages": []}, "messages must be a list of at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be texts"),
        ({"messages": ["hi"]}, "a message has a role"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stop": [""]}, "stop must be a text or at most 16"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"session": 5}, "session must be a text"),
        ({"tools": [1]}, "tools must be a list of objects"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refusal:
        requests.chat({"messages": [{"role": "user", "content": "hi"}], **change})
    assert words in str(refusal.value)
