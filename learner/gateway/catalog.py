"""The prompts of the run as token ids: read and rendered in a thread once the gateway serves, then given out by position."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from learner.config import LearnerConfig
from learner.data_config import SetConfig
from learner.gateway import rendering
from learner.gateway.bell import Bell
from learner.gateway.choosers import picker_of, rules_of
from learner.gateway.history import Rules
from learner.gateway.picking import Picker
from learner.gateway.prompts import Prompt, PromptSet, load_prompts
from protos.identity import template_digest, tokenizer_digest

logger = logging.getLogger("headrace.learner.catalog")
SCHEMA = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Prompts that fit, by row, the data sets one after another. Example: row 3 has `prompts[3]` and the ids of `ids[3]`."""

    prompts: tuple[Prompt, ...]
    ids: tuple[bytes, ...]  # little-endian int32, at least one id each
    max_new_tokens: tuple[int, ...]  # what each prompt may still draw
    stop_token_ids: tuple[int, ...]
    fingerprint: str  # of the prompts that fit, in order
    picker: Picker
    rules: dict[str, Rules]  # by data set

    @property
    def needed_tokens(self) -> int:
        """Longest prompt with what it may draw."""
        return max(len(ids) // 4 + new for ids, new in zip(self.ids, self.max_new_tokens, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """One data set as read. key: of its settings, for messages."""

    key: str
    config: SetConfig
    prompts: PromptSet


def load(config: LearnerConfig, folder: Path, cache: Path) -> Catalog:
    """Blocks for as long as tokenizing takes; a cache of the ids makes the next start quick. Raises ValueError for the user's mistakes."""
    read = {
        name: _Read(key=config.data.key_of(name), config=one, prompts=load_prompts(one.prompts, one, key=config.data.key_of(name), cache=cache.with_name(f"records{'-' * bool(name)}{name}.jsonl")))
        for name, one in config.data.sources.items()
    }
    for name, one in read.items():
        _check_name_is_free(name, one)
    model_tokens = rendering.max_model_tokens(folder)
    key = [SCHEMA, tokenizer_digest(folder), template_digest(folder), model_tokens, *([name, one.prompts.fingerprint, one.config.template, one.config.system, one.config.max_prompt_tokens, one.config.overlong] for name, one in read.items())]
    stored = _read_cache(cache, key)
    if stored is None:
        rendered = [_render(folder, one, model_tokens) for one in read.values()]
        stored = {"ids": [ids for part in rendered for ids in part["ids"]], "sets": [{"rows": part["rows"], "fingerprint": part["fingerprint"]} for part in rendered]}
        _write_cache(cache, key, stored)
    fitting = {name: [one.prompts[row] for row in part["rows"]] for (name, one), part in zip(read.items(), stored["sets"], strict=True)}
    wanted = {name: one.max_new_tokens or config.sampling.max_new_tokens for name, one in config.data.sources.items()}
    owners = [name for name, prompts in fitting.items() for _ in prompts]
    fingerprints = [part["fingerprint"] for part in stored["sets"]]
    return Catalog(
        prompts=tuple(prompt for prompts in fitting.values() for prompt in prompts),
        ids=tuple(stored["ids"]),
        max_new_tokens=tuple(rendering.max_new_tokens(len(ids) // 4, wanted=wanted[owner], max_model_tokens=model_tokens) for ids, owner in zip(stored["ids"], owners, strict=True)),
        stop_token_ids=tuple(config.sampling.stop_token_ids) or rendering.stop_ids(folder),
        fingerprint=" ".join(f"{name}={value}" if name else value for name, value in zip(read, fingerprints, strict=True)),
        picker=picker_of(config.data.sources, fitting, seed=config.seed),
        rules={name: rules_of(one) for name, one in config.data.sources.items()},
    )


def _check_name_is_free(name: str, one: _Read) -> None:
    """Raises ValueError where a named set's own field would be hidden by the set's name, which scorers get as `data_set`."""
    taken = next((prompt.prompt_id for prompt in one.prompts if name and "data_set" in prompt.fields), None)
    if taken is not None:
        raise ValueError(f"{one.key}.prompts={one.config.prompts}: prompt {taken!r} has a field `data_set`, under which scorers get the set's name; give it another name with {one.key}.fields")


def _render(folder: Path, one: _Read, model_tokens: int | None) -> dict[str, Any]:
    config, prompts = one.config, one.prompts
    renderer = rendering.Renderer(folder, template=config.template, system=config.system)
    rendered = rendering.render_all(renderer, prompts, max_model_tokens=model_tokens, max_prompt_tokens=config.max_prompt_tokens, overlong=config.overlong, key=one.key)
    if rendered.dropped:
        logger.warning("%s: %d of %d prompts are too long and left out", one.key, len(rendered.dropped), len(prompts))
    return {
        "rows": [row for row, prompt in enumerate(prompts) if prompt.prompt_id not in rendered.dropped],
        "ids": [np.asarray(ids, dtype="<i4").tobytes() for ids in rendered.token_ids],
        "fingerprint": rendered.prompts.fingerprint,
    }


def _read_cache(path: Path, key: list[Any]) -> dict[str, Any] | None:
    try:
        content = msgpack.unpackb(path.read_bytes())
    except (OSError, ValueError):
        return None  # absent or half-written by an older program: rendered again
    return content["value"] if isinstance(content, dict) and content.get("key") == key else None


def _write_cache(path: Path, key: list[Any], value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(msgpack.packb({"key": key, "value": value}))
    part.replace(path)


class Shelf:
    """The catalog once it is there. `failure` is set instead when it cannot be."""

    def __init__(self) -> None:
        self.catalog: Catalog | None = None
        self.failure: ValueError | None = None
        self._bell = Bell()

    def put(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._bell.ring()

    def fail(self, error: ValueError) -> None:
        self.failure = error
        self._bell.ring()

    async def wait(self, limit_s: float | None = None) -> Catalog | None:
        """The catalog; None when limit_s has passed without one. Raises the ValueError that loading ended with."""
        while self.catalog is None:
            if self.failure is not None:
                raise self.failure
            if not await self._bell.wait(limit_s):
                return None
        return self.catalog


async def fill(shelf: Shelf, config: LearnerConfig, folder: Path, cache: Path) -> None:
    """Loads in a thread and puts the outcome on the shelf."""
    try:
        shelf.put(await asyncio.to_thread(load, config, folder, cache))
    except ValueError as error:
        shelf.fail(error)
