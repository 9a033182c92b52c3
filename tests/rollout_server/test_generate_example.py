"""The client that README points to, against a real server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from examples.generate import generate
from tests.rollout_server.conftest import Start


async def test_the_example_client_gets_text_ids_and_logprobs(start: Start) -> None:
    running = await start()
    text, ids, logprobs = await generate(running.service.address, "1 + 1 =")
    assert isinstance(text, str) and 1 <= len(ids) == len(logprobs) <= 16
    assert all(value <= 0 for value in logprobs)


@pytest.mark.parametrize(("arguments", "words"), [(["127.0.0.1:1", "1 + 1 ="], "the rollout server at 127.0.0.1:1 did not answer (UNAVAILABLE"), ([], "usage: python examples/generate.py HOST:PORT"), (["127.0.0.1", "1"], "HOST:PORT='127.0.0.1' must be host:port")])
def test_it_says_in_one_line_what_is_missing(arguments: list[str], words: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "examples.generate", *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stderr.startswith(words) and ended.stderr.count("\n") == 1
