"""Exact counts of what vLLM's engine has drawn for each request, independent of how fast anybody reads it.

vLLM's EngineCore sends tokens and answers over one ordered channel: when the answer to "pause" is here, every token
drawn before it has arrived as well, though it may wait for long behind the output handler. So tokens are counted as they
arrive, when they are put into the handler's queue; with the scheduler paused the counts are final.
"""

from __future__ import annotations

import time
from typing import Any

from rollout_server.latency import Latency


class Accounting:
    """Watches one AsyncLLM. Uses inner names that 0.26 to 0.33 share: engine_core.outputs_queue (outputs with request_id, new_token_ids
    and finish_reason), output_processor.add_request and .request_states; start fails loudly where one is gone."""

    def __init__(self, engine: Any) -> None:
        self._names: dict[str, str] = {}  # vLLM's own id of an admitted request to ours
        self._ids: dict[str, str] = {}
        self._drawn: dict[str, int] = {}  # by our id, of requests whose last token has not arrived
        self.num_arrived = 0  # tokens of all requests since the start
        self.num_steps = 0  # engine steps that brought something
        self.scheduler: Any = None  # the newest SchedulerStats; None where the engine was told to keep none
        self.num_prefix_tokens = self.num_prefix_hit_tokens = 0  # prompt tokens looked up in the prefix cache, and found; 0 without those
        self.latency = Latency()
        self._begun_s: dict[str, float] = {}  # by our id: when it was admitted; from its first token on when that came
        self.num_preempted = 0  # requests that lost their KV cache, since the start; 0 without those
        self._processor = engine.output_processor
        self._watch(engine.engine_core, engine.output_processor)

    def _watch(self, core: Any, processor: Any) -> None:
        assert hasattr(core, "outputs_queue"), "this vLLM has no engine_core.outputs_queue: its version is not supported"
        assert hasattr(processor, "request_states"), "this vLLM has no output_processor.request_states: its version is not supported"
        put, add_request = core.outputs_queue.put_nowait, processor.add_request

        def watched_put(outputs: Any) -> None:
            if self.arrived(outputs):
                put(outputs)

        def watched_add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.admit(request.external_req_id, request.request_id)
            return add_request(request, *args, **kwargs)

        core.outputs_queue.put_nowait = watched_put
        processor.add_request = watched_add_request

    def arrived(self, outputs: Any) -> bool:
        """Counts one message of the engine, or the exception with which it ends; whether vLLM's front end is to see it."""
        if (stats := getattr(outputs, "scheduler_stats", None)) is not None:
            self._look(stats)
        for output in getattr(outputs, "outputs", ()):  # an exception ends the engine
            self._count_events(output)
            name = self._names.get(output.request_id)
            if name in self._drawn:
                self._count(name, len(output.new_token_ids), ended=output.finish_reason is not None)
        self.num_steps += bool(getattr(outputs, "outputs", ()))
        return True

    def _look(self, stats: Any) -> None:
        """Of one step; vLLM counts the prefix cache anew for each."""
        self.scheduler = stats
        if (prefix := stats.prefix_cache_stats) is not None:
            self.num_prefix_tokens += prefix.queries
            self.num_prefix_hit_tokens += prefix.hits

    def admit(self, name: str, engine_id: str) -> None:
        """A request of ours goes to the engine under this id of vLLM's."""
        self._names[engine_id] = name
        self._ids[name] = engine_id
        self._drawn[name] = 0
        self._begun_s[name] = time.monotonic()

    def _count(self, name: str, num_tokens: int, *, ended: bool) -> None:
        if num_tokens and not self._drawn[name]:
            now_s = time.monotonic()
            self.latency.first_token(now_s - self._begun_s[name])
            self._begun_s[name] = now_s
        self._drawn[name] += num_tokens
        self.num_arrived += num_tokens
        if ended:
            self._settle(name)

    def _settle(self, name: str) -> None:
        """A request draws no more."""
        num_tokens, begun_s = self._drawn.pop(name, 0), self._begun_s.pop(name, 0.0)
        if num_tokens > 1:
            self.latency.gaps(time.monotonic() - begun_s, num_tokens - 1)

    def fail(self, why: str) -> None:
        """The engine is given up: whoever waits for its tokens is told. Where vLLM's front end hands them out, that does (vllm_engine.py)."""

    def _count_events(self, output: Any) -> None:
        if events := getattr(output, "events", None):
            self.num_preempted += sum(event.type.name == "PREEMPTED" for event in events)

    def was_admitted(self, request_id: str) -> bool:
        """Whether the front end knows or knew this request."""
        return request_id in self._ids

    def forget(self, request_id: str) -> None:
        self._names.pop(self._ids.pop(request_id, ""), None)
        self._settle(request_id)

    def seen(self, request_id: str, start: int) -> tuple[list[int], list[float]] | None:
        """Ids and log-probs from token `start` on that the front end has read of a running request; None: it is unknown, or there is nothing new."""
        state = self._processor.request_states.get(self._ids.get(request_id, ""))
        if state is None or state.detokenizer is None or state.logprobs_processor is None:
            return None
        ids, entries = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs or ()
        end = min(len(ids), len(entries))
        new = range(start, end)
        return ([ids[at] for at in new], [entries[at][ids[at]].logprob for at in new]) if new else None

    def num_drawn(self) -> dict[str, int]:
        """Tokens drawn so far of every admitted and unfinished request."""
        return dict(self._drawn)
