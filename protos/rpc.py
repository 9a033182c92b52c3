"""How every service speaks gRPC: limits, keepalive, deadlines, TLS and the bearer token, in one place.

`serve` runs a server with health checks until it is told to stop: NOT_SERVING first, then a grace in which
running calls end. `channel` opens a client. `deadline_s` is the one table of deadlines.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import bearer
from protos.bearer import BlockingBearer
from protos.guard import Guard
from protos.mistakes import check_address
from protos.security import OPEN, Security, is_loopback

__all__ = ["OPEN", "Security", "Server", "blocking_channel", "channel", "deadline_s", "is_loopback", "is_transient", "retry"]

MAX_MESSAGE_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
_NOBODY_S = 25.0  # gRPC gives up connecting after 20 s: a call that took longer had somebody to talk to

_SHARED = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# A server allows one ping in five minutes unless told otherwise, and unknown option names are accepted silently:
# this is the name that works.
_SERVER = [*_SHARED, ("grpc.http2.min_ping_interval_without_data_ms", 500), ("grpc.http2.max_ping_strikes", 0), ("grpc.so_reuseport", 0)]
_CLIENT = [*_SHARED, ("grpc.max_reconnect_backoff_ms", 2_000), ("grpc.initial_reconnect_backoff_ms", 100)]

# Seconds; None: a stream that lives as long as its owner, guarded by heartbeats.
_DEADLINES_S: dict[str, float | None] = {
    "Attend": None,
    "LeaseGroups": 40.0,
    "SubmitTrajectories": None,
    "ReportProgress": 60.0,
    "FetchWeights": 1800.0,
    "GetStatus": 5.0,
    "Register": 600.0,
    "TakeBatch": None,
    "CloseBatch": 120.0,
    "BeginUpdate": 120.0,
    "EndUpdate": 1200.0,
    "SaveCut": 600.0,
    "FinishRun": 60.0,
    "Generate": 3600.0,
    "LoadWeights": 1800.0,
    "Drain": 3600.0,
    "Score": None,
    "ScoreBatch": None,
    "ScoreGroup": 3600.0,
    "ListScorers": 5.0,
    "Reset": 900.0,
    "Step": 900.0,
    "Close": 60.0,
    "ListEnvironments": 5.0,
    "Check": 5.0,
}


def deadline_s(method: str) -> float | None:
    """Deadline of a method in seconds. Raises KeyError for a method that is not in the table."""
    return _DEADLINES_S[method]


def channel(address: str, security: Security = OPEN) -> grpc.aio.Channel:
    """A client channel to `host:port`; connects lazily and for ever."""
    interceptors = bearer.interceptors(security.token)
    if security.ca is not None:
        credentials = grpc.ssl_channel_credentials(security.ca.read_bytes())
        return grpc.aio.secure_channel(address, credentials, options=_CLIENT, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options=_CLIENT, interceptors=interceptors)


def blocking_channel(address: str, security: Security = OPEN) -> grpc.Channel:
    """As `channel`, for plain threads without an event loop."""
    if security.ca is not None:
        opened = grpc.secure_channel(address, grpc.ssl_channel_credentials(security.ca.read_bytes()), options=_CLIENT)
    else:
        opened = grpc.insecure_channel(address, options=_CLIENT)
    return grpc.intercept_channel(opened, BlockingBearer(security.token)) if security.token else opened


def why_taken(address: str) -> str:
    """Why nobody else could listen on host:port; empty: somebody could, or the host is a name, which gRPC resolves."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return ""
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            return error.strerror or str(error)
    return ""


class Server:
    """A grpc.aio server with health. Serving starts with `start`; `stop` says NOT_SERVING, waits, then closes.

    Example:
        server = Server("127.0.0.1:0", [lambda s: add_RewardServiceServicer_to_server(servicer, s)])
        await server.start()      # server.port is the bound port
        await server.stop(grace_s=5.0)
    """

    def __init__(
        self, address: str, register: Sequence[Callable[[grpc.aio.Server], None]], security: Security = OPEN
    ) -> None:
        has_tls = security.certificate is not None
        self.guard = Guard(token=security.token, counts_connections=has_tls)
        self._server = grpc.aio.server(options=_SERVER, interceptors=[self.guard] if security.token or has_tls else [])
        self._address = address
        self._security = security
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add in register:
            add(self._server)
        self.port = 0

    async def start(self) -> None:
        """Binds and serves, with health NOT_SERVING until `ready`. Raises ValueError naming the address when it cannot be bound."""
        if not self._address.startswith("unix:"):
            check_address("address", self._address, may_be_free=True)
        if why := why_taken(self._address):  # gRPC would tell the same on standard error once more
            raise ValueError(f"cannot listen on {self._address}: {why}; choose another port or stop what holds it")
        try:
            self.port = self._bind()
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {self._address}: {_why(error)}; choose another port or stop what holds it") from None
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    def _bind(self) -> int:
        if self._security.certificate is None or self._security.key is None:
            return self._server.add_insecure_port(self._address)
        return self._server.add_secure_port(self._address, self._credentials(self._security.key, self._security.certificate))

    def _credentials(self, key: Path, certificate: Path) -> grpc.ServerCredentials:
        """Files that have been replaced are read again for the next connection, so that a certificate is renewed without a restart."""
        seen: tuple[int, ...] = ()

        def read() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            self.guard.handshake()
            try:
                stamps = (key.stat().st_mtime_ns, certificate.stat().st_mtime_ns)
                if stamps == seen:
                    return None
                made = grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])
            except OSError:
                return None  # being replaced just now: the present ones serve on
            seen = stamps
            return made

        seen = (key.stat().st_mtime_ns, certificate.stat().st_mtime_ns)
        first = grpc.ssl_server_certificate_configuration([(key.read_bytes(), certificate.read_bytes())])
        return grpc.dynamic_ssl_server_credentials(first, read)  # type: ignore[arg-type]  # None is "unchanged", which its stubs leave out

    async def ready(self, serving: bool = True, *, service: str = "") -> None:
        """Sets what health checks answer, those that name no service or those of `service`."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING, no new calls, running ones get `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        await self._server.wait_for_termination()


def _why(error: RuntimeError) -> str:
    """gRPC's words for a bind that failed, without its advice about its own debugging."""
    return str(error).partition("; set GRPC_VERBOSITY")[0]


def is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Whether the same call may succeed later on its own."""
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED)


async def retry(
    call: Callable[[], Awaitable[Any]], *, limit_s: float, first_wait_s: float = 0.1, longest_wait_s: float = 2.0
) -> Any:
    """Repeats an idempotent call on UNAVAILABLE with doubling waits. Raises the last error once nobody was there for limit_s, other
    errors at once. A call may block for hours before its server dies: the limit counts from the first failure after that."""
    loop = asyncio.get_running_loop()
    end, wait_s = -math.inf, first_wait_s
    while True:
        began = loop.time()
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            if end < 0 or loop.time() - began > _NOBODY_S:
                end, wait_s = loop.time() + limit_s, first_wait_s
            if loop.time() + wait_s > end:
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_wait_s)
