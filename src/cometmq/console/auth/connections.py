"""Time limits of connections.

Without these limits, a client that sends no request, or sends its headers byte by byte, would occupy one of
the limited number of connections forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_TIMEOUT_S = 10.0
"""Maximum time, in seconds, until the headers of a request have arrived.

The time begins with the connection or with the end of the previous response.
"""
EXCHANGE_TIMEOUT_S = 300.0
"""Maximum time, in seconds, from the headers of a request to the end of its response."""


class TimedProtocol(HttpToolsProtocol):
    """An HTTP connection that is closed after HEADERS_TIMEOUT_S or EXCHANGE_TIMEOUT_S.

    A connection that becomes a websocket has no timeout.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the timeout for the headers."""
        super().connection_made(transport)
        self._start_timer(HEADERS_TIMEOUT_S, self._close)

    def on_headers_complete(self) -> None:
        """Begin the timeout for the response."""
        super().on_headers_complete()
        self._start_timer(EXCHANGE_TIMEOUT_S, self.transport.abort)

    def on_response_complete(self) -> None:
        """Begin the timeout for the next request's headers."""
        super().on_response_complete()
        # If the next request has already arrived, `cycle` is that request, and its own timeout is running.
        if self.cycle.response_complete:
            self._start_timer(HEADERS_TIMEOUT_S, self._close)

    def handle_websocket_upgrade(self) -> None:
        """Cancel the running timeout, because the connection becomes a websocket."""
        self._stop_timer()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running timeout, because the connection is closed."""
        self._stop_timer()
        super().connection_lost(exc)

    def _close(self) -> None:
        # Close the connection gracefully, so that the client can still read bytes that are already written.
        # If the graceful close takes too long, abort the connection.
        self._start_timer(EXCHANGE_TIMEOUT_S, self.transport.abort)
        self.transport.close()

    def _start_timer(self, span_s: float, end: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(span_s, end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
