"""The token goes with calls of every shape, and a call of any shape without it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from protos import rpc
from protos.security import Security

SHAPES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


async def _one(request: bytes, context: Any) -> bytes:
    return request


async def _many(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request


async def _last(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return [each async for each in requests][-1]


async def _each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for each in requests:
        yield each


def echoes(server: grpc.aio.Server) -> None:
    """A service with a method of each shape, which answers what it is sent."""
    handlers = {shape: getattr(grpc, f"{shape}_rpc_method_handler")(behaviour) for shape, behaviour in zip(SHAPES, (_one, _many, _last, _each), strict=True)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", handlers),))  # type: ignore[arg-type]  # its stubs know no metadata type


def sent(shape: str, data: bytes) -> Any:
    return iter([data]) if shape.startswith("stream") else data


def received(shape: str, answer: Any) -> bytes:
    return b"".join(answer) if shape.endswith("stream") else answer


async def called(channel: grpc.aio.Channel, shape: str) -> bytes:
    call: Any = getattr(channel, shape)(f"/echo.Echo/{shape}")(sent(shape, b"hello"), timeout=10)
    if shape.endswith("stream"):
        return b"".join([each async for each in call])
    return bytes(await call)


async def served(security: Security) -> rpc.Server:
    server = rpc.Server("127.0.0.1:0", [echoes], security)
    await server.start()
    return server


@pytest.mark.parametrize("shape", SHAPES)
async def test_the_token_goes_with_a_call_of_every_shape(shape: str) -> None:
    server = await served(Security(token="s3cret"))
    address = f"127.0.0.1:{server.port}"
    try:
        async with rpc.channel(address, Security(token="s3cret")) as channel:
            assert await called(channel, shape) == b"hello"
        for token in ("", "another"):
            async with rpc.channel(address, Security(token=token)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await called(channel, shape)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert server.guard.num_refused_calls == 2
        assert await asyncio.to_thread(_blocking, address, shape) == b"hello"
    finally:
        await server.stop(0.0)


def _blocking(address: str, shape: str) -> bytes:
    with rpc.blocking_channel(address, Security(token="s3cret")) as channel:
        answer: bytes | Iterable[bytes] = getattr(channel, shape)(f"/echo.Echo/{shape}")(sent(shape, b"hello"), timeout=10)
        return received(shape, answer)
