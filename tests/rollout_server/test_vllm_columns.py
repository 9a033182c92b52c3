"""A step as three arrays: what is packed comes out again, and the front end hands it to whoever waits for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_server.engine import EngineUnavailableError
from rollout_server.vllm_columns import HANDLE, MARK, NO_TOKEN, Rows, rows_of
from rollout_server.vllm_intake import Intake, Stream


def a_step(*rows: tuple[int, list[int], int], logprobs: list[float] | None = None) -> Any:
    """Message of the engine: (handle, tokens, end code) of each request."""
    gathered = Rows()
    for handle, tokens, end in rows:
        gathered.add(handle, tokens, end=end)
    values = np.array(logprobs if logprobs is not None else [-0.5] * len(gathered.tokens), np.float32)
    carrier = SimpleNamespace(request_id=MARK, new_token_ids=[], new_logprobs=gathered.arrays(values), finish_reason=None, events=None)
    return SimpleNamespace(outputs=[carrier], scheduler_stats=None)


class FakeEngine:
    """The names of AsyncLLM that the intake uses; requests are noted and nothing is drawn."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.engine_core = self.input_processor = self
        self.output_processor = SimpleNamespace(add_request=lambda request: None, request_states={})

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def process_inputs(self, request_id: str, prompt: Any, parameters: Any, supported_tasks: Any) -> Any:
        return SimpleNamespace(request_id=request_id, external_req_id=None, parameters=parameters)

    async def add_request_async(self, request: Any) -> None:
        self.added.append(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def send(self, message: Any) -> None:
        self.outputs_queue.put_nowait(message)


async def opened(engine: FakeEngine, intake: Intake, name: str, *, streaming: bool = True) -> tuple[int, Stream]:
    parameters = SimpleNamespace(extra_args=None)
    stream = await intake.open(name, {"prompt_token_ids": [1]}, parameters, streaming=streaming)
    return parameters.extra_args[HANDLE], stream


def test_rows_keep_their_order_and_their_float32() -> None:
    rows = Rows()
    rows.add(7, [15, 2], end=1)
    rows.add(9, [4], end=0)
    rows.add(11, [], end=3)
    table, logprobs, ends = rows.arrays(np.array([-0.1, -0.7, -1e-7, 0.0], np.float32))
    assert list(rows_of(table, logprobs, ends)) == [
        (7, 15, float(np.float32(-0.1)), 0), (7, 2, float(np.float32(-0.7)), 1), (9, 4, float(np.float32(-1e-7)), 0), (11, NO_TOKEN, 0.0, 3),
    ]  # fmt: skip


async def test_tokens_reach_their_streams_whole_completions_in_one_piece_and_vllm_s_front_end_sees_none() -> None:
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.0)
    a, first = await opened(engine, intake, "a")
    b, second = await opened(engine, intake, "b", streaming=False)
    engine.send(a_step((a, [5], 0), (b, [6], 0), logprobs=[-0.25, -0.5]))
    assert await first.take() == ([5], [-0.25], None)
    assert not second.ready.is_set() and intake.num_drawn() == {"a": 1, "b": 1}
    engine.send(a_step((a, [7], 1), (b, [8], 2), logprobs=[-1.0, -2.0]))
    assert await first.take() == ([7], [-1.0], "stop")
    assert await second.take() == ([6, 8], [-0.5, -2.0], "length")
    assert intake.num_drawn() == {} and intake.num_arrived == 4 and intake.num_steps == 2 and engine.outputs_queue.empty()
    await intake.close(first)
    assert engine.aborted == []  # both had ended


async def test_what_the_scheduler_tells_is_taken_and_not_queued_for_a_handler_that_does_not_run() -> None:
    # A hundred steps with figures, of which the front end of vLLM, idle, would never take one.
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.0)
    a, _ = await opened(engine, intake, "a")
    for _ in range(100):
        step = a_step((a, [5], 0))
        step.scheduler_stats = SimpleNamespace(prefix_cache_stats=SimpleNamespace(queries=10, hits=4))
        engine.send(step)
    assert engine.outputs_queue.empty()
    assert intake.scheduler is step.scheduler_stats and (intake.num_prefix_tokens, intake.num_prefix_hit_tokens) == (1000, 400)


async def test_a_stream_s_deltas_lie_an_interval_apart_but_the_first_and_the_last_come_at_once() -> None:
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.2)
    a, stream = await opened(engine, intake, "a")
    engine.send(a_step((a, [1], 0)))
    assert (await stream.take())[0] == [1]
    for token in (2, 3, 4):
        engine.send(a_step((a, [token], 0)))
    assert not stream.ready.is_set()
    async with asyncio.timeout(60):
        assert (await stream.take())[0] == [2, 3, 4]  # though no further step came
    engine.send(a_step((a, [5], 0)))
    engine.send(a_step((a, [6], 1)))
    assert stream.ready.is_set() and await stream.take() == ([5, 6], [-0.5, -0.5], "stop")


async def test_closing_aborts_what_runs_and_its_late_tokens_go_nowhere() -> None:
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.0)
    a, stream = await opened(engine, intake, "a")
    await intake.close(stream)
    assert engine.aborted == [stream.engine_id] and intake.num_drawn() == {} and intake.was_admitted("a")
    engine.send(a_step((a, [1], 0)))
    assert intake.num_arrived == 0 and stream.ids == []


async def test_an_abort_ends_the_stream_with_the_tokens_so_far() -> None:
    engine = FakeEngine()
    intake = Intake(engine, interval_s=10.0)
    a, stream = await opened(engine, intake, "a")
    engine.send(a_step((a, [1], 0)))
    await stream.take()
    engine.send(a_step((a, [2], 0)))
    await intake.abort("a")
    assert await stream.take() == ([2], [-0.5], "abort") and engine.aborted == [stream.engine_id]


async def test_an_end_outside_a_step_and_the_engine_s_death_reach_everybody() -> None:  # faults.md 32
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.0)
    streams = [(await opened(engine, intake, f"s{i}", streaming=False))[1] for i in range(3)]
    engine.send(SimpleNamespace(outputs=[SimpleNamespace(request_id=streams[0].engine_id, new_token_ids=[], finish_reason="abort", events=None)], scheduler_stats=None))
    assert await streams[0].take() == ([], [], "abort")
    engine.send(SimpleNamespace(outputs=[SimpleNamespace(request_id=streams[1].engine_id, new_token_ids=[], finish_reason="error", events=None)], scheduler_stats=None))
    with pytest.raises(EngineUnavailableError, match="ended the request with 'error'"):
        await streams[1].take()
    engine.send(RuntimeError("killed"))
    with pytest.raises(EngineUnavailableError, match="the engine's process is gone: RuntimeError: killed"):
        await streams[2].take()


async def test_what_is_not_in_columns_goes_vllm_s_own_way_and_is_counted() -> None:
    engine = FakeEngine()
    intake = Intake(engine, interval_s=0.0)
    engine.output_processor.add_request(SimpleNamespace(external_req_id="probe", request_id="probe-1"))
    message = a_step((1, [3], 0))
    message.outputs.append(SimpleNamespace(request_id="probe-1", new_token_ids=[4], finish_reason="length", events=None))
    engine.send(message)
    assert [output.request_id for output in engine.outputs_queue.get_nowait().outputs] == ["probe-1"]
    assert intake.num_arrived == 1 and intake.num_drawn() == {} and intake.num_steps == 1
