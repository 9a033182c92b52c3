"""One request of the small engine: what the step thread keeps of it, and its deltas on the asyncio side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import torch

from rollout_server.engine import Delta, Finish, SamplingSpec
from rollout_server.spans import SpanTrack


@dataclass(kw_only=True, slots=True)
class Request:
    """One running request; after its start only the step thread writes to it."""

    request_id: str
    tokens: list[int]  # prompt, then what was drawn
    num_prompt: int
    max_new_tokens: int
    sampling: SamplingSpec
    generator: torch.Generator
    track: SpanTrack
    deltas: asyncio.Queue[Delta | Exception]
    loop: asyncio.AbstractEventLoop
    logprobs: list[float] = field(default_factory=list)  # of what was drawn
    cache: Any = None  # KV of tokens[:-1]; None: nothing computed, or thrown away by an update
    stop: Finish | None = None
    begun_s: float = field(default_factory=time.monotonic)  # when it came; from its first token on when that was drawn

    @property
    def num_drawn(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def finished(self) -> bool:
        return self.num_drawn >= self.max_new_tokens

    def put(self, item: Delta | Exception) -> None:
        self.loop.call_soon_threadsafe(self.deltas.put_nowait, item)


async def deltas_of(request: Request, stream: bool) -> AsyncGenerator[Delta, None]:
    """The request's deltas as they come, or all in one at its end."""
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        item = await request.deltas.get()
        if isinstance(item, Exception):
            raise item
        ids += item.token_ids
        logprobs += item.logprobs
        if stream:
            yield item
        elif item.finish:
            yield Delta(token_ids=ids, logprobs=logprobs, finish=item.finish, spans=item.spans)
        if item.finish:
            return
