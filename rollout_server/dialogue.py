"""From messages to the ids of a next turn: what was drawn stays as it was drawn, and only what is new is encoded.

The template renders the whole history as text. Where that text begins with what the last turn was rendered to and what was answered, the rest
of it is new: its ids are appended to the ids that are there. Where it does not (a template that leaves earlier thoughts out, messages
that were changed), the history was rewritten, and all of it is encoded afresh: another strand of the sample (conversation.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

Message = Mapping[str, Any]


class Renders(Protocol):
    """What a dialogue needs of a tokenizer (tokens.py)."""

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """The template's text, ready for the assistant's turn. Raises ValueError."""

    def first_ids(self, text: str, *, template: bool) -> list[int]:
        """Ids of the beginning of a sequence, with exactly one beginning-of-sequence token where the model has one."""

    def more_ids(self, text: str) -> list[int]:
        """Ids of text that goes on."""

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens."""

    def piece(self, token: int) -> str:
        """Of one token, special or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt: what is rendered, and the ids that stand for it. Example: Asked(messages=(...,), tools=None, text="...", ids=(5, 6), goes_on=False)"""

    messages: tuple[Message, ...]  # as given
    rendered: tuple[Message, ...]  # as rendered: with the policy's own words where it answered
    tools: tuple[Any, ...] | None
    text: str
    ids: tuple[int, ...]
    goes_on: bool  # from an earlier answer, whose ids are its beginning


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A prompt with its answer."""

    asked: Asked
    ids: tuple[int, ...]
    text: str  # as drawn, without special tokens
    message: Message  # as the caller got it; when it comes back, it is this answer


class Dialogue:
    """The turns of one sample, or of one session. Example: `asked = d.ask(messages); d.answered(asked, ids, message)`"""

    def __init__(self, tokens: Renders, *, template: bool) -> None:
        """template: False puts the contents of messages one after the other, as they are."""
        self._tokens = tokens
        self._template = template
        self._answers: list[Answered] = []

    def ask(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Asked:
        """The ids of a prompt that ends in something to be answered. Raises ValueError for messages that cannot be rendered."""
        given, wanted = tuple(messages), tuple(tools) if tools else None
        if not given:
            raise ValueError("messages is empty: give at least one")
        before = self._last_before(given, wanted)
        if before is None:
            text = self._render(given, wanted)
            return self._checked(Asked(messages=given, rendered=given, tools=wanted, text=text, ids=tuple(self._tokens.first_ids(text, template=self._template)), goes_on=False))
        rest = given[len(before.asked.messages) + 1 :]
        rendered = (*before.asked.rendered, {"role": "assistant", "content": before.text}, *rest)
        text = self._render(rendered, wanted)
        new = self._new(before, text)
        asked = Asked(messages=given, rendered=rendered, tools=wanted, text=text, ids=(), goes_on=new is not None)
        if new is None:
            return self._checked(replace(asked, ids=tuple(self._tokens.first_ids(text, template=self._template))))
        return self._checked(replace(asked, ids=(*before.asked.ids, *before.ids, *self._tokens.more_ids(new))))

    def ask_text(self, text: str) -> Asked:
        """The ids of a text to go on from: where it begins with an earlier text and its answer, their ids are its beginning. Raises ValueError."""
        fitting = [each for each in self._answers if not each.asked.messages and each.asked.text and text.startswith(each.asked.text + each.text)]
        before = max(fitting, key=lambda each: len(each.asked.text) + len(each.text), default=None)
        asked = Asked(messages=(), rendered=(), tools=None, text=text, ids=(), goes_on=before is not None)
        if before is None:
            return self._checked(replace(asked, ids=tuple(self._tokens.first_ids(text, template=False))))
        rest = text[len(before.asked.text) + len(before.text) :]
        return self._checked(replace(asked, ids=(*before.asked.ids, *before.ids, *self._tokens.more_ids(rest))))

    def answered(self, asked: Asked, ids: Sequence[int], message: Message) -> Answered:
        """Remembers an answer."""
        self._answers.append(Answered(asked=asked, ids=tuple(ids), text=self._tokens.text(ids), message=message))
        return self._answers[-1]

    def _checked(self, asked: Asked) -> Asked:
        if not asked.ids:
            raise ValueError("the messages render to no tokens at all; say something in them")
        return asked

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        if self._template:
            return self._tokens.render(messages, tools)
        return "".join(str(message.get("content") or "") for message in messages)

    def _last_before(self, messages: tuple[Message, ...], tools: tuple[Any, ...] | None) -> Answered | None:
        """The latest answer that these messages go on from: its prompt's messages, then itself, come first in them."""
        fitting = [
            each for each in self._answers
            if each.asked.messages and each.asked.tools == tools and len(each.asked.messages) < len(messages)
            and messages[: len(each.asked.messages)] == each.asked.messages and _same(messages[len(each.asked.messages)], each.message)
        ]  # fmt: skip
        return max(fitting, key=lambda each: len(each.asked.messages), default=None)

    def _new(self, before: Answered, text: str) -> str | None:
        """What comes after the answer in the whole text; None: that does not go on from it."""
        if not text.startswith(before.asked.text):
            return None
        rest = text[len(before.asked.text) :]
        if not rest.startswith(before.text):  # a template may trim what is said
            if not rest.lstrip().startswith(before.text.strip()):
                return None
            rest = rest[len(rest) - len(rest.lstrip()) :]
            said = before.text.strip()
        else:
            said = before.text
        after = rest[len(said) :]
        stop = self._tokens.piece(before.ids[-1])  # where it was drawn, the template's own is not written a second time
        return after[len(stop) :] if stop and not said.endswith(stop) and after.startswith(stop) else after


def _same(given: Message, own: Message) -> bool:
    """Whether a message that came back is the one that was answered: clients leave out what is empty, and add nothing that counts."""
    return all(_plain(given.get(key)) == _plain(own.get(key)) for key in ("role", "content", "tool_calls"))


def _plain(value: Any) -> Any:
    if value in (None, "", [], ()):
        return None
    if isinstance(value, Mapping):
        return {key: inner for key, inner in ((key, _plain(inner)) for key, inner in value.items()) if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
