"""The client that README points to, against a real server."""

from __future__ import annotations

from examples.generate import generate
from tests.rollout_server.conftest import Start


async def test_the_example_client_gets_text_ids_and_logprobs(start: Start) -> None:
    running = await start()
    text, ids, logprobs = await generate(running.service.address, "1 + 1 =")
    assert isinstance(text, str) and 1 <= len(ids) == len(logprobs) <= 16
    assert all(value <= 0 for value in logprobs)
