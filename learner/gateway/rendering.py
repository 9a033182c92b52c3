"""From a prompt to the token ids that the engine sees. Uses the model's own files; imports neither transformers nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from learner.gateway.chat_template import ChatTemplate, read_json, special_tokens
from learner.gateway.prompts import Prompt, PromptSet

_BATCH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The prompts that fit, by row, and their ids. dropped: prompt_id to length in tokens of those left out."""

    prompts: PromptSet
    token_ids: tuple[tuple[int, ...], ...]
    dropped: dict[str, int]


class Renderer:
    """Template and tokenizer of one model.

    chat: the template decides which special tokens there are, as for anyone who serves the model. raw: the string as it is, after a
    beginning-of-sequence token where the tokenizer adds one. Either way a sequence never begins with two of them.
    system: put before every chat that does not begin with a system message of its own.
    Raises ValueError when the model's folder lacks what is needed.
    """

    def __init__(self, folder: Path, *, template: Literal["chat", "raw"] = "chat", system: str | None = None) -> None:
        if template == "raw" and system is not None:
            raise ValueError("data.system is set with data.template=raw: a raw prompt has no place for a system message; remove it, or use template=chat")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"model {folder} has no tokenizer.json; save its tokenizer once with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(folder) if template == "chat" else None
        self._system: tuple[dict[str, str], ...] = () if system is None else ({"role": "system", "content": system},)
        bos_token = special_tokens(folder).get("bos_token")
        self._bos: int | None = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        added = read_json(folder / "tokenizer_config.json").get("add_bos_token") is True or self._bos in self._tokenizer.encode("").ids
        self._prefix = (self._bos,) if self._template is None and added and self._bos is not None else ()

    def text(self, prompt: Prompt) -> str:
        """What is tokenized. Raises ValueError for a chat that is to be rendered raw."""
        if self._template is not None:
            own_system = prompt.messages[0]["role"] == "system"
            return self._template.render(prompt.messages if own_system else (*self._system, *prompt.messages))
        if len(prompt.messages) != 1 or prompt.messages[0]["role"] != "user":
            raise ValueError(f"prompt {prompt.prompt_id!r} is a list of {len(prompt.messages)} chat messages with data.template=raw; give a string, or use template=chat")
        return prompt.text

    def ids(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Token ids of each prompt, at least one. Raises ValueError naming a prompt that has none."""
        encodings = self._tokenizer.encode_batch([self.text(prompt) for prompt in prompts], add_special_tokens=False)
        found = [self._one_bos((*self._prefix, *encoding.ids)) for encoding in encodings]
        for prompt, ids in zip(prompts, found, strict=True):
            if not ids:
                raise ValueError(f"prompt {prompt.prompt_id!r} renders to no tokens at all; remove it")
        return found

    def _one_bos(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        start = 0
        while self._bos is not None and ids[start : start + 2] == (self._bos, self._bos):
            start += 1
        return ids[start:]


def render_all(
    renderer: Renderer,
    prompts: PromptSet,
    *,
    max_model_tokens: int | None,
    max_prompt_tokens: int | None = None,
    overlong: Literal["refuse", "drop"] = "refuse",
    key: str = "data",
) -> Rendered:
    """Renders every prompt before the run starts, so that none fails at step 400.

    A prompt is overlong above max_prompt_tokens, or at max_model_tokens and above, where nothing could be drawn: with a model of 10, 9
    fit and 10 do not. Raises ValueError for overlong prompts that are refused, and when none are left.
    """
    bounds = [*([] if max_model_tokens is None else [max_model_tokens - 1]), *([] if max_prompt_tokens is None else [max_prompt_tokens])]
    ids = [found for start in range(0, len(prompts), _BATCH) for found in renderer.ids(prompts[start : start + _BATCH])]
    fits = [not bounds or len(found) <= min(bounds) for found in ids]
    dropped = {prompt.prompt_id: len(found) for prompt, found, fit in zip(prompts, ids, fits, strict=True) if not fit}
    rule = f"over the limit of {min(bounds, default=0)} prompt tokens ({key}.max_prompt_tokens={max_prompt_tokens}, the model's length {max_model_tokens} less one to draw)"
    if dropped and overlong == "refuse":
        name, length = next(iter(dropped.items()))
        raise ValueError(f"{len(dropped)} of {len(prompts)} prompts are {rule}, the first is {name!r} with {length}; shorten them, raise the limit, or set {key}.overlong=drop")
    if len(dropped) == len(prompts):
        raise ValueError(f"all {len(prompts)} prompts are {rule}; shorten them or raise the limit")
    kept = [prompt for prompt, fit in zip(prompts, fits, strict=True) if fit]
    return Rendered(prompts=PromptSet(kept), token_ids=tuple(found for found, fit in zip(ids, fits, strict=True) if fit), dropped=dropped)


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Every end-of-sequence id that generation_config.json, config.json and the tokenizer name, ascending; empty when none does."""
    config = read_json(folder / "config.json")
    named = [read_json(folder / "generation_config.json").get("eos_token_id"), config.get("eos_token_id"), config.get("text_config", {}).get("eos_token_id")]
    ids = {number for value in named for number in (value if isinstance(value, list) else [value]) if number is not None}
    eos_token = special_tokens(folder).get("eos_token")
    if eos_token is not None and (folder / "tokenizer.json").is_file():
        ids.add(Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(eos_token))
    return tuple(sorted(ids - {None}))


def max_model_tokens(folder: Path) -> int | None:
    """Longest sequence of the model, prompt and completion, as config.json says; None when it does not."""
    config = read_json(folder / "config.json")
    length = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return length if isinstance(length, int) else None


def max_new_tokens(num_prompt_tokens: int, *, wanted: int, max_model_tokens: int | None) -> int:
    """Tokens that may be drawn after a prompt: at least 1, since longer prompts were left out. With a model of 10 and 9 in the prompt, 1."""
    left = wanted if max_model_tokens is None else min(wanted, max_model_tokens - num_prompt_tokens)
    assert left >= 1, f"a prompt of {num_prompt_tokens} tokens leaves no room in a model of {max_model_tokens}"
    return left
