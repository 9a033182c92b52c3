"""Calls that are asked again while nobody answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from protos import rpc


def answers(*script: float | str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Callable[[], Awaitable[str]]:
    """A call that, each time it is made, takes the next number of seconds and then finds nobody; or gives the next word."""
    steps = iter(script)

    async def call() -> str:
        step = next(steps)
        if isinstance(step, str):
            return step
        await asyncio.sleep(step)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "nobody")

    return call


async def test_a_call_that_waited_longer_than_the_limit_before_the_other_side_died_is_still_asked_again() -> None:
    assert await rpc.retry(answers(0.3, 0.0, "back"), limit_s=0.2, first_wait_s=0.01) == "back"


async def test_the_limit_counts_from_the_first_failure_in_a_row() -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await rpc.retry(answers(*[0.0] * 1000), limit_s=0.1, first_wait_s=0.02, longest_wait_s=0.02)


async def test_an_error_that_time_does_not_heal_is_raised_at_once() -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await rpc.retry(answers(0.0, "never", code=grpc.StatusCode.ABORTED), limit_s=1.0)
