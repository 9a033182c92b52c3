"""Asking a service whether it serves."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.rpc import OPEN, Security, channel, deadline_s


async def until_serving(address: str, *, security: Security = OPEN, service: str = "", pause_s: float = 0.25) -> None:
    """Returns once the server at host:port answers SERVING for a service ("": all of it); waits for ever, so callers set the limit."""
    async with channel(address, security) as open_channel:
        stub = health_pb2_grpc.HealthStub(open_channel)
        while not await _serves(stub, service):
            await asyncio.sleep(pause_s)


async def _serves(stub: health_pb2_grpc.HealthStub, service: str) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=deadline_s("Check"))
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
