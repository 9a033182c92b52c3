"""Exact counts of what vLLM's front end has been given, independent of how fast anybody reads it.

vLLM's EngineCore sends tokens and answers over one ordered channel: when the answer to "pause" is here, every token
drawn before it has arrived as well, but may still wait in the queue before the output handler. `settle` waits until
that queue is empty and the handler is back at it; then the counts are final until "resume".
"""

from __future__ import annotations

import asyncio
from typing import Any


class Accounting:
    """Watches one AsyncLLM. Uses three inner names that 0.26 to 0.33 share: engine_core.outputs_queue,
    engine_core.get_output_async and output_processor; start fails loudly where one is gone."""

    def __init__(self, engine: Any) -> None:
        self._core = engine.engine_core
        self._processor = engine.output_processor
        self._engine = engine
        self._waits = False
        self._admitted: set[str] = set()
        self._wrap()

    def _wrap(self) -> None:
        get_output, add_request = self._core.get_output_async, self._processor.add_request
        assert hasattr(self._core, "outputs_queue"), "this vLLM has no engine_core.outputs_queue: its version is not supported"

        async def watched_get_output() -> Any:
            self._waits = True  # whatever was got before has been processed
            outputs = await get_output()
            self._waits = False
            return outputs

        def watched_add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._admitted.add(request.external_req_id)
            return add_request(request, *args, **kwargs)

        self._core.get_output_async = watched_get_output
        self._processor.add_request = watched_add_request

    def was_admitted(self, request_id: str) -> bool:
        """Whether the front end knows or knew this request."""
        return request_id in self._admitted

    def forget(self, request_id: str) -> None:
        self._admitted.discard(request_id)

    def num_drawn(self) -> dict[str, int]:
        """Tokens drawn so far of every admitted and unfinished request."""
        return {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in self._processor.request_states.values()
            if state.detokenizer is not None
        }

    async def settle(self) -> None:
        """Returns once everything that has arrived is counted. Call with the scheduler paused, under a deadline."""
        while not self._settled():
            await asyncio.sleep(0.001)

    def _settled(self) -> bool:
        handler = self._engine.output_handler
        if handler is None or handler.done():
            return True  # no request was ever made, or the engine is dead and nothing will be counted any more
        return self._waits and bool(self._core.outputs_queue.empty())
