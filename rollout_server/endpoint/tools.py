"""Calls of tools in what a policy said. Pure.

hermes: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number of them, as the templates of Qwen and Hermes ask for. A block
whose JSON cannot be read, or that has no name, is no call and stays in the text, so that the policy's mistake is seen as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """Example: ToolCall(name="add", arguments='{"a": 1}')"""

    name: str
    arguments: str  # JSON


def parse(text: str, parser: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text without its calls, and these in order. Example: parse('so <tool_call>{"name": "f"}</tool_call>', "hermes") is ("so ", (ToolCall(name="f", arguments="{}"),))."""
    if parser == "none":
        return text, ()
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(found[1])
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    rest = _BLOCK.sub(take, text)
    return (rest if not calls else rest.rstrip("\n")), tuple(calls)


def _call(block: str) -> ToolCall | None:
    try:
        said = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    return ToolCall(name=said["name"], arguments=arguments if isinstance(arguments, str) else json.dumps(arguments))
