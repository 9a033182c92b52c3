"""From a prompt to the token ids that the engine sees. Uses the model's tokenizer and files; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learner.gateway.prompts import Prompt, PromptSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Prompts that fit, with their ids. dropped: prompt_id to length in tokens of those left out."""

    prompts: PromptSet
    token_ids: tuple[tuple[int, ...], ...]
    dropped: dict[str, int]


class Renderer:
    """Template and tokenizer of one model. system: put before every chat that has no system message of its own."""

    def __init__(self, folder: Path, *, template: Literal["chat", "raw"] = "chat", system: str | None = None) -> None: ...

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of one prompt, with exactly one beginning-of-sequence token where the model has one."""


def render_all(renderer: Renderer, prompts: PromptSet, *, max_prompt_tokens: int, overlong: Literal["refuse", "drop"]) -> Rendered:
    """Renders every prompt before the run starts. Raises ValueError for prompts over max_prompt_tokens when they are refused."""


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Every end-of-sequence id that generation_config.json, config.json and the tokenizer name, ascending."""


def max_model_tokens(folder: Path) -> int:
    """max_position_embeddings of config.json."""


def max_new_tokens(num_prompt_tokens: int, *, wanted: int, max_model_len: int) -> int:
    """Tokens that a prompt may still draw: at least 1, since prompts of max_model_len or more were left out."""
