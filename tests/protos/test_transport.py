"""What gRPC does by default and must not do here."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos import rpc


class Silent(grpc.GenericRpcHandler):
    """One method that says nothing for a while."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def wait(request: Any, context: Any) -> health_pb2.HealthCheckResponse:
            await asyncio.sleep(self._silent_s)
            return health_pb2.HealthCheckResponse()

        shape = grpc.unary_unary_rpc_method_handler(wait, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString)
        return shape if handler_call_details.method == "/test/Wait" else None


@pytest.mark.slow
async def test_a_call_that_is_silent_for_nine_seconds_outlives_a_client_that_pings_every_second() -> None:
    # faults.md 122
    server = rpc.Server("127.0.0.1:0", [lambda grpc_server: grpc_server.add_generic_rpc_handlers((Silent(9.0),))])
    await server.start()
    often = [("grpc.keepalive_time_ms", 1_000), ("grpc.http2.max_pings_without_data", 0), ("grpc.keepalive_permit_without_calls", 1)]
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=often) as channel:
            call = channel.unary_unary("/test/Wait", health_pb2.HealthCheckRequest.SerializeToString, health_pb2.HealthCheckResponse.FromString)
            assert await call(health_pb2.HealthCheckRequest(), timeout=20) == health_pb2.HealthCheckResponse()
    finally:
        await server.stop(0.0)  # one left open keeps gRPC's thread, and with it the interpreter, from ending
