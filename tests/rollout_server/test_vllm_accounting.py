"""The count is final only when the output handler has worked off what arrived before the pause's answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rollout_server.vllm_accounting import Accounting


class FakeEngine:
    """The three inner names of AsyncLLM, with a handler that takes `work_s` for each output."""

    def __init__(self, work_s: float) -> None:
        self.outputs_queue: asyncio.Queue[int] = asyncio.Queue()
        self.num_handled = 0
        self.engine_core = SimpleNamespace(outputs_queue=self.outputs_queue, get_output_async=self.outputs_queue.get)
        self.output_processor = SimpleNamespace(add_request=lambda request: None, request_states={})
        self.output_handler: asyncio.Task[None] | None = None
        self._work_s = work_s

    def start(self) -> None:
        self.output_handler = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        while True:
            await self.engine_core.get_output_async()
            await asyncio.sleep(self._work_s)  # vLLM yields between chunks of 128 requests
            self.num_handled += 1


async def test_settle_waits_for_what_is_queued_and_for_what_is_half_handled() -> None:
    engine = FakeEngine(work_s=0.05)
    accounting = Accounting(engine)
    engine.start()
    for output in range(3):
        engine.outputs_queue.put_nowait(output)
    await asyncio.wait_for(accounting.settle(), 2)
    assert engine.num_handled == 3


async def test_settle_returns_at_once_when_no_request_was_ever_made_or_the_handler_is_dead() -> None:
    engine = FakeEngine(work_s=0)
    accounting = Accounting(engine)
    await asyncio.wait_for(accounting.settle(), 0.5)
    engine.outputs_queue.put_nowait(0)
    engine.start()
    assert engine.output_handler is not None
    engine.output_handler.cancel()
    await asyncio.sleep(0)
    await asyncio.wait_for(accounting.settle(), 0.5)


def test_a_request_is_known_once_admitted_until_forgotten() -> None:
    engine: Any = FakeEngine(work_s=0)
    accounting = Accounting(engine)
    assert not accounting.was_admitted("a")
    engine.output_processor.add_request(SimpleNamespace(external_req_id="a"))
    assert accounting.was_admitted("a")
    accounting.forget("a")
    assert not accounting.was_admitted("a")
