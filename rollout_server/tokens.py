"""Text of token ids and ids of text, by the model's own tokenizer. Ids drawn are never encoded again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from protos.vocabulary import ids_with_text, ids_without_text


class Tokens:
    """The tokenizer of a Hugging Face folder. Raises ValueError when the folder has none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no tokenizer that transformers can load: {error}") from error
        self.stop_ids = _stop_ids(folder, self._tokenizer.eos_token_id)  # each of them ends an answer
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary))  # characters of the longest token
        known = ids_with_text(folder)  # None: a tokenizer in another form, which no run has: its gateway asks for tokenizer.json
        self._ids = frozenset(vocabulary.values()) if known is None else known
        self._size = max(self._ids) + 1

    @property
    def size(self) -> int:
        """Ids at or above it have no text: padding rows of the model's embedding."""
        return self._size

    @property
    def end_token(self) -> int | None:
        """The id that ends a text; None: the tokenizer names none."""
        return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)

    def without_text(self, vocab_size: int) -> list[int]:
        """Ids below vocab_size that no text has: never to be drawn, and left out by the learner's head likewise (protos/vocabulary.py)."""
        return list(ids_without_text(self._ids, vocab_size))

    @property
    def has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def text(self, ids: Sequence[int]) -> str:
        """Decoded completion without special tokens, spaces left as they are; ids without text are left out."""
        known = [token for token in ids if token < self.size]
        return str(self._tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """Ids of a text with the tokenizer's special tokens."""
        return list(self._tokenizer.encode(text))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of (role, content) turns in the chat template with a generation prompt. Raises ValueError without a template."""
        return self.first_ids(self.render([{"role": role, "content": content} for role, content in messages], None), template=True)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
        """The chat template's text with a generation prompt. Raises ValueError without a template, or where it refuses the messages."""
        if not self.has_template:
            raise ValueError("the model has no chat template; send text or prompt_ids")
        try:
            return str(self._tokenizer.apply_chat_template([dict(message) for message in messages], tools=list(tools) if tools else None, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # templates raise what they like, all of it about the messages
            raise ValueError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error

    def first_ids(self, text: str, *, template: bool) -> list[int]:
        """Ids of the beginning of a sequence. A template writes its own special tokens; raw text gets those that the tokenizer adds. Never two
        beginning-of-sequence tokens."""
        ids = list(self._tokenizer.encode(text, add_special_tokens=not template))
        bos = self._tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def more_ids(self, text: str) -> list[int]:
        """Ids of text that goes on, without special tokens other than those written in it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def piece(self, token: int) -> str:
        """Text of one token, special or not; empty for an id without text."""
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)) if token < self.size else ""


def _stop_ids(folder: Path, eos: int | None) -> tuple[int, ...]:
    """Every end-of-sequence id that generation_config.json, config.json and the tokenizer name, ascending."""
    ids = set() if eos is None else {eos}
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        said = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        ids |= {number for number in (said if isinstance(said, list) else [said]) if isinstance(number, int)}
    return tuple(sorted(ids))
