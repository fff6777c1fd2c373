"""The port for Prometheus: /metrics, /healthz (the event loop responds), /readyz (the server is ready).

The load is limited, however many clients scrape: the samples are collected and encoded at most once per
second, and at most a tenth of the time is spent on this work. All clients receive the same text in
Prometheus' oldest format, which every client can read.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from cometmq.errors import ConfigError
from cometmq.metrics.families import Source
from cometmq.text import printable

MAX_CONNECTIONS = 8
"""Maximum number of connections.

At the limit, a further connection closes the oldest connection that has not sent a request, and all
connections that were opened more than INACTIVITY_TIMEOUT_S ago. If there is no such connection, the further
connection itself is closed.
"""
INACTIVITY_TIMEOUT_S = 10
"""Seconds without activity after which a connection is closed. See also MAX_CONNECTIONS."""
CLOSE_TIMEOUT_S = 1.0
"""Maximum time, in seconds, until a closed connection frees its slot."""
KEEP_S = 1.0
REUSE_FACTOR = 10
"""How long a response text is reused, at least: this factor times the duration of its creation."""
TEXT = "text/plain; version=0.0.4; charset=utf-8"
Start = Callable[[str, list[tuple[str, str]]], Any]


class MetricsPort:
    """An HTTP server for Prometheus, in threads of its own, until `stop`. Creation raises ConfigError."""

    def __init__(self, interface: str, port: int, source: Source) -> None:
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        self._source = source
        registry.register(self)
        page = _Page(registry)

        def answer(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
            path = environ.get("PATH_INFO")
            if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
                return _say(start, "405 Method Not Allowed", "GET")
            try:
                if path == "/metrics":
                    text = page.text()
                    start("200 OK", [("Content-Type", TEXT)])
                    return [text]
                if path in ("/healthz", "/readyz"):
                    problem = source.why_not_ready()
                    ready = path == "/healthz" or not problem
                    return _say(start, "200 OK" if ready else "503 Service Unavailable", problem or "ok")
            except TimeoutError:
                return _say(start, "503 Service Unavailable", "the server's loop does not answer")
            return _say(start, "404 Not Found", "/metrics, /healthz or /readyz")

        try:
            self._server = _Server(interface, port)
        except OSError as error:
            expected = f"a port that can be listened on ({error.strerror or error})"
            raise ConfigError("metricsPromExporterPort", str(port), expected) from error
        self._server.set_app(answer)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics port", daemon=True
        )
        self._thread.start()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the source as those of the Prometheus library, which calls this."""
        for family in self._source.families().table.values():
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.words, labels=family.labels, unit=family.unit)
            for values, number in family.samples:
                metric.add_metric(values, number)
            yield metric

    def stop(self) -> None:
        """Stop listening. Requests in progress still get their response."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _say(start: Start, status: str, words: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{printable(words)}\n".encode()]


class _Page:
    """The text of all samples, created on request if the previous text is too old."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making = threading.Lock()
        self._text: bytes | None = None  # None if the event loop was too busy for the last collection
        self._until = 0.0

    def text(self) -> bytes:
        """Return all samples in Prometheus' text format, from the last collection if that is recent enough.

        Raises TimeoutError if the event loop, whose thread must not call this, is too busy.
        """
        with self._making:
            begun = time.monotonic()
            if begun >= self._until:
                self._text = None
                try:
                    self._text = generate_latest(self._registry)
                except TimeoutError:
                    pass
                done = time.monotonic()
                self._until = done + max(KEEP_S, REUSE_FACTOR * (done - begun))
            if self._text is None:
                raise TimeoutError
            return self._text


class _Handler(WSGIRequestHandler):
    timeout = INACTIVITY_TIMEOUT_S
    server: _Server

    def get_environ(self) -> dict[str, Any]:
        """Return the WSGI environment of a request, and record that its connection has sent it."""
        self.server.has_asked(self.connection)
        return super().get_environ()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing, because a scrape every few seconds is not an event."""

    def address_string(self) -> str:
        """Return the client's address without a DNS query."""
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, interface: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            interface or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._since: dict[socket.socket, float] = {}  # open connections and their start times, oldest first
        self._silent: dict[socket.socket, None] = {}  # connections that have not sent a request
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind like HTTPServer, but without a DNS query."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in a new thread. If no slot can be freed, close the connection."""
        if not self._room.acquire(blocking=False) and not self._make_room():
            self.shutdown_request(request)
            return
        self._since[request] = time.monotonic()
        self._silent[request] = None
        super().process_request(request, client_address)

    def has_asked(self, request: socket.socket) -> None:
        """Record that a connection's request has been read."""
        self._silent.pop(request, None)

    def _make_room(self) -> bool:
        """Free a slot for a new connection (see MAX_CONNECTIONS) and occupy it. Return whether it worked."""
        late = time.monotonic() - INACTIVITY_TIMEOUT_S
        cut = [*list(self._silent)[:1], *(each for each, since in list(self._since.items()) if since < late)]
        for each in cut:
            with contextlib.suppress(OSError):  # the peer has closed the connection
                each.shutdown(socket.SHUT_RDWR)
        return bool(cut) and self._room.acquire(timeout=CLOSE_TIMEOUT_S)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._since.pop(request, None)
            self._silent.pop(request, None)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a peer that closed its connection."""
