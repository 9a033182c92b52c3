"""Tokens are counted as they arrive, however far behind the output handler is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_server.config import RolloutConfig
from rollout_server.engine import EngineUnavailableError
from rollout_server.latency import Latency, quantiles
from rollout_server.vllm_accounting import Accounting
from rollout_server.vllm_engine import VllmEngine


def an_engine() -> Any:
    """The inner names of AsyncLLM, with a handler that never runs."""
    return SimpleNamespace(
        engine_core=SimpleNamespace(outputs_queue=asyncio.Queue()), output_processor=SimpleNamespace(add_request=lambda request: None, request_states={})
    )  # fmt: skip


def output(request_id: str, num_tokens: int, finish: str | None = None) -> Any:
    return SimpleNamespace(request_id=request_id, new_token_ids=[7] * num_tokens, finish_reason=finish)


def admit(engine: Any, name: str) -> None:
    engine.output_processor.add_request(SimpleNamespace(external_req_id=name, request_id=f"{name}-inner"))


async def test_what_waits_behind_the_handler_is_counted_already() -> None:
    engine = an_engine()
    accounting = Accounting(engine)
    admit(engine, "a")
    admit(engine, "b")
    assert accounting.num_drawn() == {"a": 0, "b": 0}
    engine.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[output("a-inner", 1), output("b-inner", 2)]))
    await engine.engine_core.outputs_queue.put(SimpleNamespace(outputs=[output("a-inner", 3), output("stranger", 9)]))
    assert accounting.num_drawn() == {"a": 4, "b": 2}
    assert engine.engine_core.outputs_queue.qsize() == 2  # the handler still gets them all


async def test_a_finished_or_forgotten_request_is_not_counted_and_a_dead_engine_s_message_is_no_output() -> None:
    engine = an_engine()
    accounting = Accounting(engine)
    admit(engine, "a")
    admit(engine, "b")
    engine.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[output("a-inner", 1, "stop")]))
    accounting.forget("b")
    engine.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[output("a-inner", 1), output("b-inner", 1)]))
    engine.engine_core.outputs_queue.put_nowait(RuntimeError("the engine died"))
    assert accounting.num_drawn() == {} and accounting.was_admitted("a") and not accounting.was_admitted("b")


async def test_a_request_is_known_once_admitted_until_forgotten() -> None:
    engine = an_engine()
    accounting = Accounting(engine)
    assert not accounting.was_admitted("a")
    admit(engine, "a")
    assert accounting.was_admitted("a")
    accounting.forget("a")
    assert not accounting.was_admitted("a")


def test_a_vllm_without_the_queue_is_refused() -> None:
    with pytest.raises(AssertionError, match="no engine_core.outputs_queue"):
        Accounting(SimpleNamespace(engine_core=SimpleNamespace(), output_processor=None))


async def test_the_wait_for_the_first_token_and_the_gaps_after_it_are_taken_of_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # admitted at 10 s, first token at 12, two more until the end at 15: 2 s, and 3 s for two gaps; a request of one token has no gap
    engine, now = an_engine(), [10.0]
    monkeypatch.setattr("rollout_server.vllm_accounting.time.monotonic", lambda: now[0])
    accounting = Accounting(engine)
    admit(engine, "a")
    for now[0], num_tokens, finish in ((12.0, 1, None), (13.0, 1, None), (15.0, 1, "stop")):
        engine.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[output("a-inner", num_tokens, finish)]))
    admit(engine, "b")
    now[0] = 16.0
    engine.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[output("b-inner", 1, "length")]))
    latency = accounting.latency
    assert list(latency.first_token_s) == [2.0, 1.0] and list(latency.inter_token_s) == [1.5]
    assert (latency.num_first_tokens, latency.total_first_token_s, latency.num_gaps, latency.total_gap_s) == (2, 3.0, 2, 3.0)
    assert quantiles(latency.first_token_s) == {"0.5": 1.0, "0.95": 2.0, "0.99": 2.0} and quantiles([]) == {}
    assert quantiles([4, 1, 3, 2]) == {"0.5": 2, "0.95": 4, "0.99": 4}
    assert accounting._begun_s == {} and Latency.of([latency, latency]).num_gaps == 4


async def test_a_call_that_meets_vllm_s_own_words_for_a_death_says_ours(tiny_model: Path) -> None:
    class EngineDeadError(Exception):
        pass

    async def dying() -> None:
        raise EngineDeadError("see the root cause above")

    engine = VllmEngine(RolloutConfig(model=str(tiny_model)), tiny_model)
    with pytest.raises(EngineUnavailableError, match="process died"):
        await engine._guarded(dying(), 1.0)
