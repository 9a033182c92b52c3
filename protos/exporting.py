"""Figures of a service for Prometheus: declared in a table, read at each scrape, served over HTTP beside the service's own port.

    scrape ─▶ a thread of the HTTP server ─▶ the service's event loop reads every figure ─▶ the thread writes the page

The table is read on the loop, between two of its steps, so figures are taken of a state that does not change meanwhile, and the
service spends nothing on them while nobody asks.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any, Generic, Literal, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protos.mistakes import check_address
from protos.security import OPEN, Security

logger = logging.getLogger("headrace.metrics")
READ_S = 5.0  # for the loop to read the table
State = TypeVar("State")
Outer = TypeVar("Outer")
Value = float | None  # None: nothing to tell now, and no line in the page
Read = Callable[[State], "Value | Mapping[Any, Value]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure(Generic[State]):
    """One metric.

    Example: `Figure(name="headrace_rollout_tokens_total", kind="counter", text="Tokens drawn.", read=lambda engine: engine.num_tokens)`
    """

    name: str  # headrace_<service>_<what>_<unit>; a counter ends in _total
    kind: Literal["counter", "gauge"]
    text: str  # one sentence for people
    labels: tuple[str, ...] = ()
    read: Read[State]  # a number; with labels a mapping from their values (one string, or a tuple of several) to numbers

    def family(self, state: State) -> Metric:
        """Its lines of the page now."""
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name, self.text, labels=self.labels)
        for labels, value in self._values(state):
            if value is not None:
                family.add_metric(labels, float(value))
        return family

    def of(self, pick: Callable[[Outer], State]) -> Figure[Outer]:
        """The same figure of a larger state, a part of which it is read of."""
        return Figure(name=self.name, kind=self.kind, text=self.text, labels=self.labels, read=lambda outer: self.read(pick(outer)))

    def values(self, state: State) -> Iterator[tuple[dict[str, str], float]]:
        """What it tells now, each value with its labels."""
        for parts, value in self._values(state):
            if value is not None:
                yield dict(zip(self.labels, parts, strict=True)), float(value)

    def _values(self, state: State) -> Iterator[tuple[Sequence[str], Value]]:
        found = self.read(state)
        if isinstance(found, Mapping):
            for key, value in found.items():
                yield ([str(part) for part in key] if isinstance(key, tuple) else [str(key)]), value
        else:
            yield [], found


class Exporter(Generic[State]):
    """Serves a table at http://ADDRESS/metrics, over TLS and asking for the token where `security` has them.

    Example:
        exporter = Exporter("127.0.0.1:0", FIGURES, state)
        await exporter.start()      # exporter.port is the bound port
        await exporter.stop()
    """

    def __init__(self, address: str, figures: Iterable[Figure[State]], state: State, security: Security = OPEN) -> None:
        """address: empty: nothing is served."""
        self._address, self._figures, self._state, self._security = address, tuple(figures), state, security
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.port = 0

    async def start(self) -> None:
        """Binds and serves. Raises ValueError naming the address when it cannot be bound."""
        if not self._address:
            return
        check_address("metrics_address", self._address, may_be_free=True)
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(_Collector(self._collect))
        host, _, port = self._address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port))
        except OSError as error:
            raise ValueError(f"metrics_address={self._address} cannot be listened on: {error.strerror}; choose another port, or leave it empty") from None
        self._server.set_app(_guarded(make_wsgi_app(registry), self._security.token))
        if self._security.certificate is not None and self._security.key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._security.certificate, self._security.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        logger.info("metrics on port %d", self.port)

    async def stop(self) -> None:
        """Frees the port. Idempotent; scrapes that are under way fail."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    def _collect(self) -> list[Metric]:
        """In a thread of the server."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(READ_S)

    async def _read(self) -> list[Metric]:
        return [figure.family(self._state) for figure in self._figures]


class _Collector:
    """What the registry asks at each scrape."""

    def __init__(self, collect: Callable[[], list[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> list[Metric]:
        """Nothing: names are the table's, and are not looked for at registration."""
        return []


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Quiet)

    def server_bind(self) -> None:
        """As WSGIServer's, without its look-up of the host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away, or did not speak TLS."""
        logger.info("a scrape from %s failed", client_address[0])


class _Quiet(WSGIRequestHandler):
    timeout = 30  # of a connection that says nothing

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no event."""


def _guarded(app: Any, token: str) -> Any:
    """The app behind the service's bearer token; without one, as it is."""
    if not token:
        return app

    def asked(environ: dict[str, Any], start_response: Any) -> Any:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), f"Bearer {token}".encode()):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("Content-Type", "text/plain")])
        return [b"this run's bearer token is needed\n"]

    return asked
