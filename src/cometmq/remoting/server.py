"""The server side: accepts connections and passes their requests to handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from cometmq.remoting.connection import Connection, Handler, Shortcut
from cometmq.remoting.dispatch import Dispatcher
from cometmq.remoting.housekeeping import ConnectionTable
from cometmq.remoting.limits import Limits
from cometmq.remoting.loop import stop_accepting
from cometmq.remoting.memory import connect_in_memory, network_of
from cometmq.remoting.opening import Openings, Tls
from cometmq.remoting.tick import Tick

BACKLOG = 1024


class RemotingServer:
    """Serves requests on one or more addresses. It must be created inside the running loop.

    A handler is called as `handler(connection, request)`. It returns the response frame, or None if it
    responds later (`connection.respond`) or never. A handler may also be an async function: it runs as a task
    and receives the body as bytes. Other handlers must copy the parts of `request.body` that they keep,
    because the buffer is overwritten after they return. A CommandError(code, remark) becomes a response with
    that code. For any other exception the code is 1 and the remark is "<type>: <message>".

    Args:
        handlers: The handlers by request code.
        tls: The TLS of the connections, optional or required. Connections in memory never use it.
        shortcuts: Functions that may handle a request before it is decoded, by the first 12 bytes of a JSON
            header.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        *,
        default: Handler | None = None,
        shortcuts: Mapping[bytes, Shortcut] | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        limits: Limits | None = None,
        tick: Tick | None = None,
        tls: Tls | None = None,
        scan_s: float = 1.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.tick = tick if tick is not None else Tick(self._loop)
        self._handlers = dict(handlers)
        self._dispatcher = Dispatcher(handlers, default)
        self._all_shortcuts = dict(shortcuts or {})
        self._shortcuts = dict(self._all_shortcuts)
        self._user_on_open = on_open
        self._user_on_close = on_close
        self._limits = limits if limits is not None else Limits()
        self._make: Callable[[], asyncio.BufferedProtocol] = self._make_connection
        self._openings: Openings | None = None
        if tls is not None:
            self._make = self._openings = Openings(tls, self._limits, self._make_connection)
        self._table: ConnectionTable[Connection] = ConnectionTable(self._loop, scan_s)
        self._listeners: list[Callable[[], None]] = []  # Functions that stop listening, one for each address
        self._stopped = False

    @property
    def connections(self) -> set[Connection]:
        """The open connections."""
        return self._table.connections

    def override_handlers(self, codes: Collection[int], handler: Handler) -> None:
        """Pass requests with the given codes to `handler` instead of to the handlers registered for them.

        Each call replaces the codes of the previous call; an empty `codes` restores all registered handlers.
        While any code is overridden, the server uses no shortcuts, not even for other codes.
        """
        overridden = dict.fromkeys(self._handlers.keys() & set(codes), handler)
        self._dispatcher.handlers = self._handlers | overridden
        self._shortcuts.clear()
        if not overridden:
            self._shortcuts.update(self._all_shortcuts)

    async def start(self, host: str, port: int) -> int:
        """Listen on one more address and return the port; port 0 selects a free one."""
        network = network_of(host)
        if network is not None:
            bound, close = network.listen(self._make_connection, port)
        else:
            listener = await self._loop.create_server(
                self._make, host, port, backlog=BACKLOG, reuse_address=True
            )
            bound, close = listener.sockets[0].getsockname()[1], partial(stop_accepting, listener)
        self._listeners.append(close)
        return bound

    def connect_in_memory(self, client: Connection, name: tuple[str, int]) -> None:
        """Connect a client of this event loop without a socket. `name` is its host and port here."""
        client.partner = self._make_connection()
        client.partner.partner = client
        connect_in_memory(client, client.partner, name)

    def stop_listening(self) -> None:
        """Stop accepting connections. Open connections continue."""
        for close in self._listeners:
            close()
        self._listeners.clear()

    async def stop(self, drain_s: float = 3.0) -> None:
        """Stop listening, finish the requests in progress, and close all connections.

        Async handlers that do not finish within `drain_s` seconds are cancelled. Connections whose responses
        cannot be sent within another `drain_s` seconds are aborted.
        """
        self.stop_listening()
        self._stopped = True
        if self._openings is not None:
            await self._openings.close_all()
        tasks = self._dispatcher.tasks
        if tasks:
            await asyncio.wait(set(tasks), timeout=drain_s)
            for task in set(tasks):
                task.cancel()
        self.tick.run_now()
        await self._table.close_all(drain_s)
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _make_connection(self) -> Connection:
        # The bound method `__call__` is passed, because calling it is faster than calling the dispatcher
        # object.
        return Connection(
            self._dispatcher.__call__, self.tick, self._limits, self._on_open, self._on_close,
            shortcuts=self._shortcuts,
        )  # fmt: skip

    def _on_open(self, connection: Connection) -> None:
        if self._stopped:  # Connections accepted during a stop are aborted, as nothing closes them later
            connection.abort()
            return
        self._table.add(connection)
        if self._user_on_open is not None:
            self._user_on_open(connection)

    def _on_close(self, connection: Connection) -> None:
        self._table.discard(connection)
        if self._user_on_close is not None:
            self._user_on_close(connection)
