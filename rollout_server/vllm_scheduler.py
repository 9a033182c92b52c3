"""vLLM's scheduler, which sends a step's tokens as columns (vllm_columns.py). Lives in the EngineCore process (`scheduler_cls`).

    update_from_output    consumes what the workers drew, produces the outputs that leave the process

Only what leaves the process changes: vLLM's own code draws, stops, frees and accounts. It is called without the log-probs, so that
it slices none; then the sampled tokens' log-probs of all requests are taken out of the workers' array at once. Requests without
a handle (the probe) get vLLM's own outputs with their slice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from rollout_server.vllm_columns import HANDLE, MARK, Rows


def scheduler(**arguments: Any) -> Any:
    """The scheduler that vLLM would have chosen itself, with columns; called in place of its class."""
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    return AsyncColumnScheduler(**arguments) if is_async else ColumnScheduler(**arguments)


class _Columns:
    """Mixed in before vLLM's scheduler; names carry the prefix so that none of its own is hidden."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headrace_handles: dict[str, int] = {}  # by vLLM's id, of requests that travel in columns
        self._headrace_plain: set[str] = set()  # vLLM's ids of requests without handle that want log-probs
        self._headrace_freed: list[str] = []

    def add_request(self, request: Any) -> None:
        super().add_request(request)  # type: ignore[misc]
        parameters = request.sampling_params
        if parameters is None:
            return
        handle = (parameters.extra_args or {}).get(HANDLE)
        if handle is not None:
            self._headrace_handles[request.request_id] = int(handle)
        elif parameters.num_logprobs is not None:
            self._headrace_plain.add(request.request_id)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._headrace_freed.append(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        logprobs = model_runner_output.logprobs
        if logprobs is not None:
            model_runner_output.logprobs = None  # else every request gets a slice of its own
        answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for answer in answers.values():
            if answer.outputs:
                answer.outputs = self._headrace_gathered(answer.outputs, logprobs, model_runner_output.req_id_to_index)
        for name in self._headrace_freed:
            self._headrace_handles.pop(name, None)
            self._headrace_plain.discard(name)
        self._headrace_freed.clear()
        return answers

    def _headrace_gathered(self, outputs: list[Any], logprobs: Any, index: dict[str, int]) -> list[Any]:
        """The outputs with those of requests in columns made one."""
        starts = None if logprobs is None else logprobs.cu_num_generated_tokens
        kept, events, rows = [], [], Rows()
        places: list[int] = []  # of each row in the workers' arrays
        for output in outputs:
            name, tokens = output.request_id, output.new_token_ids
            place = index.get(name, 0) if starts is None else starts[index.get(name, 0)]
            handle = self._headrace_handles.get(name)
            if handle is None:
                if logprobs is not None and name in self._headrace_plain:
                    output.new_logprobs = logprobs.slice_request(index[name], len(tokens))
                kept.append(output)
                continue
            rows.add(handle, tokens, end=0 if output.finish_reason is None else int(output.finish_reason) + 1)
            places.extend(range(place, place + (len(tokens) or 1)))
            if output.events:
                events.extend(output.events)
        return [*kept, _carrier(rows, places, logprobs, events)] if places else kept


def _carrier(rows: Rows, places: list[int], logprobs: Any, events: list[Any]) -> Any:
    """The output that carries a step. Rows without token have any number for a log-prob."""
    values = np.zeros(len(places), np.float32) if logprobs is None else logprobs.logprobs[places, 0]
    assert logprobs is not None or all(token < 0 for token in rows.tokens), "vLLM drew tokens for requests in columns and gave no log-probs"
    return EngineCoreOutput(request_id=MARK, new_token_ids=[], new_logprobs=LogprobsLists(*rows.arrays(values)), events=events or None)


class ColumnScheduler(_Columns, Scheduler):  # type: ignore[misc]
    """Where steps are not overlapped (on a CPU)."""


class AsyncColumnScheduler(_Columns, AsyncScheduler):  # type: ignore[misc]
    """Where the next step is scheduled while this one runs (on a GPU)."""
