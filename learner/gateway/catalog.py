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
from learner.gateway import rendering
from learner.gateway.bell import Bell
from learner.gateway.prompts import Prompt, PromptOrder, load_prompts
from protos.identity import template_digest, tokenizer_digest

logger = logging.getLogger("headrace.learner.catalog")
SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """Prompts that fit, by row. Example: row 3 has `prompts[3]` and the ids of `ids[3]`."""

    prompts: tuple[Prompt, ...]
    ids: tuple[bytes, ...]  # little-endian int32, at least one id each
    max_new_tokens: tuple[int, ...]  # what each prompt may still draw
    stop_token_ids: tuple[int, ...]
    fingerprint: str  # of the prompts that fit, in order
    order: PromptOrder

    @property
    def needed_tokens(self) -> int:
        """Longest prompt with what it may draw."""
        return max(len(ids) // 4 + new for ids, new in zip(self.ids, self.max_new_tokens, strict=True))


def load(config: LearnerConfig, folder: Path, cache: Path) -> Catalog:
    """Blocks for as long as tokenizing takes; a cache of the ids makes the next start quick. Raises ValueError for the user's mistakes."""
    data = config.data
    prompts = load_prompts(data.prompts, data, cache=cache.with_name("records.jsonl"))
    model_tokens = rendering.max_model_tokens(folder)
    key = [SCHEMA, prompts.fingerprint, tokenizer_digest(folder), template_digest(folder), data.template, data.system, data.max_prompt_tokens, model_tokens, data.overlong]
    stored = _read_cache(cache, key)
    if stored is None:
        renderer = rendering.Renderer(folder, template=data.template, system=data.system)
        rendered = rendering.render_all(renderer, prompts, max_model_tokens=model_tokens, max_prompt_tokens=data.max_prompt_tokens, overlong=data.overlong)
        if rendered.dropped:
            logger.warning("%d of %d prompts are too long and left out", len(rendered.dropped), len(prompts))
        stored = {
            "rows": [row for row, prompt in enumerate(prompts) if prompt.prompt_id not in rendered.dropped],
            "ids": [np.asarray(ids, dtype="<i4").tobytes() for ids in rendered.token_ids],
            "fingerprint": rendered.prompts.fingerprint,
        }
        _write_cache(cache, key, stored)
    wanted = config.sampling.max_new_tokens
    return Catalog(
        prompts=tuple(prompts[row] for row in stored["rows"]),
        ids=tuple(stored["ids"]),
        max_new_tokens=tuple(rendering.max_new_tokens(len(ids) // 4, wanted=wanted, max_model_tokens=model_tokens) for ids in stored["ids"]),
        stop_token_ids=tuple(config.sampling.stop_token_ids) or rendering.stop_ids(folder),
        fingerprint=stored["fingerprint"],
        order=PromptOrder(num_rows=len(stored["rows"]), seed=config.seed, shuffle=data.shuffle, epochs=data.epochs),
    )


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
