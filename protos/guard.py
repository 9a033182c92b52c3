"""What a server refuses, and counts: calls without its bearer token, and connections that never came to a call.

The TLS handshake happens inside gRPC, which tells nobody when one fails (a plain client, a client that does not trust the certificate,
or finds it expired). What can be seen is that a handshake begins, and the first call of each connection; the difference is what was refused.
"""

from __future__ import annotations

import hmac
import inspect
import logging
import time
from collections import OrderedDict
from typing import Any

import grpc

log = logging.getLogger("headrace.rpc")

_SAY_EVERY_S = 10.0
_REMEMBERED = 16_384  # connections whose first call is remembered
_REFUSED = "this service asks for a bearer token, and the call brought none or another"


class Guard(grpc.aio.ServerInterceptor):
    """Stands before every call of a server. Example: `Guard(token="s3cret", counts_connections=True)`; health checks need no token."""

    def __init__(self, *, token: str, counts_connections: bool) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._counts_connections = counts_connections
        self._heard: OrderedDict[str, None] = OrderedDict()  # peers that made a call
        self._num_heard = 0
        self._num_handshakes = 0
        self._said_s = float("-inf")
        self.num_refused_calls = 0

    @property
    def num_refused_connections(self) -> int:
        """Handshakes that came to no call (yet: a connection that was made a moment ago counts until its first call)."""
        return max(0, self._num_handshakes - self._num_heard)

    @property
    def num_refused(self) -> int:
        """Calls and connections."""
        return self.num_refused_calls + self.num_refused_connections

    def handshake(self) -> None:
        """A TLS handshake begins; gRPC calls this from a thread of its own."""
        self._num_handshakes += 1

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if not self._is_welcome(handler_call_details):
            self._count_refusal(handler_call_details.method)
            handler = _with_behaviour(handler, _refuse_one, _refuse_many)
        return _noting(handler, self._hear) if self._counts_connections else handler

    def _is_welcome(self, details: grpc.HandlerCallDetails) -> bool:
        if not self._expected or details.method.startswith("/grpc.health."):
            return True
        given = str(dict(details.invocation_metadata).get("authorization", "")).encode()
        return hmac.compare_digest(given, self._expected)

    def _count_refusal(self, method: str) -> None:
        self.num_refused_calls += 1
        if time.monotonic() - self._said_s > _SAY_EVERY_S:
            self._said_s = time.monotonic()
            log.warning("refused a call of %s without this service's token (%d so far)", method, self.num_refused_calls)

    def _hear(self, peer: str) -> None:
        """The first call of each connection."""
        if peer not in self._heard:
            self._heard[peer] = None
            self._num_heard += 1
            if len(self._heard) > _REMEMBERED:
                self._heard.popitem(last=False)


async def _refuse_one(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED)


async def _refuse_many(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSED)
    yield


_SHAPES = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def _with_behaviour(handler: Any, one: Any, many: Any) -> Any:
    """The same handler with another function: `one` where it answers once, `many` where it answers with a stream."""
    _, make = _SHAPES[(bool(handler.request_streaming), bool(handler.response_streaming))]
    return make(many if handler.response_streaming else one, handler.request_deserializer, handler.response_serializer)


def _noting(handler: Any, hear: Any) -> Any:
    """The same handler, which tells `hear` its peer first. What gRPC asks of the function (a coroutine, or an asynchronous generator) stays."""
    name, _ = _SHAPES[(bool(handler.request_streaming), bool(handler.response_streaming))]
    behaviour = getattr(handler, name)

    async def one(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        hear(context.peer())
        return await behaviour(request, context)

    async def many(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        hear(context.peer())
        async for response in behaviour(request, context):
            yield response

    generates = inspect.isasyncgenfunction(behaviour)
    if handler.response_streaming and not generates:  # it writes by itself
        return _with_behaviour(handler, one, one)
    return _with_behaviour(handler, one, many)
