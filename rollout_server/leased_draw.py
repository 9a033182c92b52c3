"""One answer from a replica, whole, with a look at every token while it is drawn where one is wanted."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from protos.identity import sample_seed
from rollout_server.engine import Delta, EngineUnavailableError, SamplingSpec
from rollout_server.replica import Replica
from rollout_server.spans import Span

logger = logging.getLogger("headrace.rollout.leased_draw")
_PAUSE_S = 0.2  # after an engine that died

Watch = Callable[[Sequence[int], Sequence[float]], int | None]  # tokens drawn since the last call; answers how many of all tokens are wanted, None: go on


class Draw(Protocol):
    """How a sample's answers are drawn."""

    async def __call__(self, prompt_ids: Sequence[int], *, turn: int, max_new_tokens: int, watch: Watch | None = None) -> Delta | None:
        """All tokens of one answer; None: the replica drains, and the sample is given up. Raises EngineUnavailableError, and ValueError for a
        prompt that the engine refuses."""


async def drawn(replica: Replica, prompt_ids: Sequence[int], spec: SamplingSpec, request_id: str, watch: Watch | None) -> Delta:
    """The last delta of a request with all its tokens. Raises as Replica.generate.

    Once `watch` says how many tokens are wanted, the request is aborted and ends there, as one that stopped by itself.
    """
    if watch is None:
        async with aclosing(replica.generate(prompt_ids, spec, request_id, stream=False)) as deltas:
            return await anext(deltas)
    ids: list[int] = []
    logprobs: list[float] = []
    wanted: int | None = None
    async with aclosing(replica.generate(prompt_ids, spec, request_id)) as deltas:
        async for delta in deltas:
            ids += delta.token_ids
            logprobs += delta.logprobs
            if wanted is None and delta.token_ids and (wanted := watch(delta.token_ids, delta.logprobs)) is not None and delta.finish is None:
                await replica.engine.abort(request_id)
            if delta.finish is not None:
                if wanted is None:
                    return Delta(token_ids=ids, logprobs=logprobs, finish=delta.finish, spans=delta.spans)
                return Delta(token_ids=ids[:wanted], logprobs=logprobs[:wanted], finish="stop", spans=_cut(delta.spans, wanted))
    raise AssertionError("a request ends with a finish")


def _cut(spans: Sequence[Span], num_tokens: int) -> tuple[Span, ...]:
    return tuple(Span(version=span.version, start=span.start, end=min(span.end, num_tokens)) for span in spans if span.start < num_tokens)


class LeasedDraw:
    """The answers of one leased sample, each with a seed of its own. A Draw."""

    def __init__(self, replica: Replica, spec: SamplingSpec, name: str, *, until_loaded: Callable[[], Awaitable[bool]], busy: Callable[[bool], None]) -> None:
        """name: of the sample, for requests and logs. until_loaded: waits for the lease's least version; False once the replica drains.
        busy(True): the sample wants a place in the engine; busy(False): it has left it."""
        self._replica, self._spec, self._name = replica, spec, name
        self._until_loaded, self._busy = until_loaded, busy
        self._serial = itertools.count()
        self._num_running = 0

    async def __call__(self, prompt_ids: Sequence[int], *, turn: int, max_new_tokens: int, watch: Watch | None = None) -> Delta | None:
        seed = sample_seed(self._spec.seed, turn) if turn else self._spec.seed
        spec = replace(self._spec, max_new_tokens=max_new_tokens, seed=seed)
        looked = _Looked(watch) if watch is not None else None
        self._num_running += 1
        self._busy(True)
        try:
            while await self._until_loaded():
                try:
                    with self._replica.tally.drawing.of(1):
                        last = await drawn(self._replica, prompt_ids, spec, f"{self._name}/{turn}/{next(self._serial)}", looked)
                except EngineUnavailableError as error:
                    if looked is not None and looked.has_seen:
                        raise  # somebody has the tokens already
                    logger.info("turn %d of sample %s is drawn again: %s", turn, self._name, error)
                    await asyncio.sleep(_PAUSE_S)
                    continue
                return None if last.finish == "abort" else last
            return None
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._busy(False)


class _Looked:
    """A watch that remembers whether it has seen anything."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self.has_seen = False

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float]) -> int | None:
        self.has_seen = True
        return self._watch(ids, logprobs)
