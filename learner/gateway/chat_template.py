"""A model's chat template, rendered as its publisher expects, without importing transformers.

That import alone takes seconds and brings torch with it; the gateway must be back within two seconds of a crash. The environment a
template may rely on is described at https://huggingface.co/docs/transformers/chat_templating_writing; a test compares the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """Renders messages to text, ready for the assistant's turn.

    Raises ValueError when the model's folder has no template, or it is not one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._special = special_tokens(folder)
        self._template = _compile(folder, _source(folder))

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Raises ValueError with the template's own words when it refuses the messages."""
        try:
            return self._template.render(messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._folder} refuses this prompt: {error}; change the messages or data.system, or use data.template=raw") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object; take the file from the model's publisher again")
    return value


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and the like, as tokenizer_config.json and special_tokens_map.json name them."""
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    texts = {name: value["content"] if isinstance(value, dict) and "content" in value else value for name, value in named.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _source(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several by name; the one called "default" is for plain chats
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"model {folder} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json); use data.template=raw")
    return source


def _compile(folder: Path, source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template of {folder} is not a Jinja template: {error}; take it from the model's publisher again, or use data.template=raw") from None


class _GenerationTag(Extension):
    """{% generation %} only marks the assistant's words in a template; they are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
