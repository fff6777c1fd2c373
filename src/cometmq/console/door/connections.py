"""How long a connection may take for what it asks: the console has room for so many, and one that asks
nothing, or says its headers word by word, would keep that room from others for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S = 10.0
"""From its begin, and from the answer before, until the headers of a request are there."""
EXCHANGE_S = 300.0
"""From its headers until a request and its answer are through: who reads slower is no browser that waits."""


class TimedProtocol(HttpToolsProtocol):
    """The web server's side of a connection, which closes it in the end. What becomes a page's socket is not
    of its concern any more."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has come."""
        super().connection_made(transport)
        self._within(HEAD_S, self._close)

    def on_headers_complete(self) -> None:
        """A request has its headers."""
        super().on_headers_complete()
        self._within(EXCHANGE_S, self.transport.abort)

    def on_response_complete(self) -> None:
        """An answer has been written."""
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next one has begun
            self._within(HEAD_S, self._close)

    def handle_websocket_upgrade(self) -> None:
        """A page's socket begins."""
        self._end()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._end()
        super().connection_lost(exc)

    def _close(self) -> None:
        # What is written is read first, but not for ever.
        self._within(EXCHANGE_S, self.transport.abort)
        self.transport.close()

    def _within(self, span_s: float, end: Callable[[], None]) -> None:
        self._end()
        self._late = self.loop.call_later(span_s, end)

    def _end(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
