"""The seam between what serves (servicer, actor) and what draws tokens (vLLM, or the small engine of tests)."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rollout_server.latency import Latency
from rollout_server.spans import Span
from rollout_server.weights.driver import Updatable

Finish = Literal["stop", "length", "abort"]
MIN_TEMPERATURE = 0.01


class EngineUnavailableError(Exception):
    """The engine cannot draw now: it is starting, dead, or was told to stop. The same request may be made again elsewhere or later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """The whole distribution; neutral unless stated. Example: `SamplingSpec(temperature=1.0, max_new_tokens=64, seed=7)`."""

    temperature: float  # 0: greedy
    top_p: float = 1.0  # 1: the whole vocabulary
    top_k: int = 0  # 0: the whole vocabulary
    max_new_tokens: int  # at least 1
    stop_token_ids: tuple[int, ...] = ()  # any of these ends the sample and stays in it
    seed: int = 0
    bad_words: tuple[str, ...] = ()  # never drawn, as the tokenizer cuts them
    regex: str = ""  # what the whole completion matches; empty: anything
    json_schema: str = ""  # JSON text of a schema that the whole completion follows; empty: anything

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0; 0 is greedy")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature} lies between 0 and {MIN_TEMPERATURE}, where engines clamp in silence; take 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps the whole vocabulary")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0; 0 keeps the whole vocabulary")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        self._check_cuts()

    def _check_cuts(self) -> None:
        if not all(self.bad_words):
            raise ValueError(f"bad_words={list(self.bad_words)} holds an empty word, which would forbid everything; leave it out")
        if self.regex and self.json_schema:
            raise ValueError("regex and json_schema are both set; a completion follows one of them")
        if self.json_schema:
            try:
                schema = json.loads(self.json_schema)
            except ValueError as error:
                raise ValueError(f"json_schema is no JSON: {error}") from None
            if not isinstance(schema, dict):
                raise ValueError(f"json_schema must be a JSON object, got {type(schema).__name__}")

    @property
    def guided(self) -> bool:
        """Whether a grammar says what may come next; then the model's end token must be among stop_token_ids."""
        return bool(self.regex or self.json_schema)

    def check_trainable(self) -> None:
        """Raises ValueError for a distribution that a learner cannot evaluate: one that is cut where only the engine knows."""
        cuts = [name for name, there in (("top_p", self.top_p != 1), ("top_k", self.top_k), ("bad_words", self.bad_words), ("regex", self.regex), ("json_schema", self.json_schema)) if there]
        if cuts:
            raise ValueError(f"{', '.join(cuts)} cut the distribution, and the learner evaluates the whole vocabulary's: such samples cannot be trained on; leave them out")


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Tokens drawn since the last delta.

    Example, the last of a sample that drew 2 tokens under version 1: `Delta(token_ids=[5, 2], logprobs=[-0.1, -0.7],
    finish="stop", spans=(Span(version=1, start=0, end=2),))`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # of exactly these tokens, under the distribution they were drawn from
    finish: Finish | None = None  # None: more will follow
    spans: tuple[Span, ...] = ()  # of the whole completion, on the last delta


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Load of an engine. Example: `EngineStats(num_running=3, num_tokens=1200, idle_s=0.5)`."""

    num_running: int  # requests that are drawn or wait to be
    num_tokens: int  # tokens handed out since start
    idle_s: float  # seconds since start without any request
    num_waiting: int | None = None  # of the running ones, those in the engine's queue; None: it does not tell
    kv_use: float | None = None  # share of the KV cache in use, 0 to 1; None: it does not tell
    num_drawn: int | None = None  # tokens that left the model since start, handed out or not; None: as num_tokens
    num_preempted: int | None = None  # requests that lost their KV cache, since start; None: it does not tell
    num_prefix_tokens: int | None = None  # prompt tokens looked up in the prefix cache, since start; None: it does not tell
    num_prefix_hit_tokens: int | None = None  # of these, those found there


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine serves. Example: `EngineInfo(name="vllm 0.32.0", vocab_size=49152, ...)`."""

    name: str  # with its version
    vocab_size: int  # rows of the embedding; ids at or above it are refused
    max_model_len: int  # prompt and completion together, in tokens
    device_uuid: str  # empty on CPU
    worker_device_uuids: tuple[str, ...] = ("",)  # of every worker that holds a part of the model, in order
    visible_device_uuids: tuple[str, ...] = ()  # GPUs that all workers see
    columns: bool = False  # vLLM: tokens leave it a step at a time, not an object each


class Engine(Updatable, Protocol):
    """Draws tokens and takes weight updates (rollout_server/weights/driver.py says how)."""

    @property
    def info(self) -> EngineInfo:
        """Constant while the engine lives; only after `start`."""

    async def start(self) -> None:
        """Loads the base weights. Raises ValueError when the model or the arguments cannot be served."""

    async def stop(self) -> None:
        """Ends the engine and its processes. Idempotent. Requests that run end with EngineUnavailableError."""

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, request_id: str, *, stream: bool = True
    ) -> AsyncGenerator[Delta, None]:
        """Draws one completion; without stream only the last delta comes, with all of it.

        Closing the generator or cancelling its task aborts the request. Raises ValueError for a prompt that is empty,
        overlong or outside the vocabulary, EngineUnavailableError when the engine dies or is not up.
        """

    def drawn(self, request_id: str, start: int = 0) -> Delta | None:
        """What a running request has drawn so far from its token `start` on, with the spans of all of it, without finish.

        None: there is nothing new, or the request is unknown or has ended. Costs as much as the new tokens.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream ends with finish "abort" and the tokens so far. Unknown ids are ignored."""

    async def check(self) -> None:
        """Raises EngineUnavailableError when the engine is dead."""

    def stats(self) -> EngineStats: ...

    @property
    def latency(self) -> Latency:
        """Of the engine's present life."""


def check_prompt(prompt_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raises ValueError naming the rule that a prompt breaks."""
    if not prompt_ids:
        raise ValueError("the prompt is empty: it needs at least one token")
    if len(prompt_ids) >= max_model_len:
        raise ValueError(f"the prompt has {len(prompt_ids)} tokens, and max_model_len={max_model_len} must leave room for one more; shorten it or raise max_model_len")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"prompt ids must lie in [0, {vocab_size}), got {low if low < 0 else high}")


class Meter:
    """Counts for EngineStats: running requests, tokens, and the time in which there was no request."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_tokens = 0
        self._idle_s = 0.0
        self._idle_since_s = time.monotonic()

    def begin(self) -> None:
        if self.num_running == 0:
            self._idle_s += time.monotonic() - self._idle_since_s
        self.num_running += 1

    def end(self) -> None:
        self.num_running -= 1
        if self.num_running == 0:
            self._idle_since_s = time.monotonic()

    def stats(self) -> EngineStats:
        now_idle_s = time.monotonic() - self._idle_since_s if self.num_running == 0 else 0.0
        return EngineStats(num_running=self.num_running, num_tokens=self.num_tokens, idle_s=self._idle_s + now_idle_s)
