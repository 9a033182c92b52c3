"""Text of token ids and ids of text, by the model's own tokenizer. Ids drawn are never encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Tokens:
    """The tokenizer of a Hugging Face folder. Raises ValueError when the folder has none."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} has no tokenizer that transformers can load: {error}") from error
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary))  # characters of the longest token
        self._ids = frozenset(vocabulary.values())
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
        """Ids below vocab_size that no text has: never to be drawn."""
        return sorted(set(range(vocab_size)).difference(self._ids))

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
        if not self.has_template:
            raise ValueError("the model has no chat template; send text or prompt_ids")
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            text = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # templates raise what they like, all of it about the messages
            raise ValueError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))
