"""The listening side: accepts connections and hands their requests to handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from cometmq.remoting.connection import Connection
from cometmq.remoting.dispatch import Dispatcher, Handler, Shortcut
from cometmq.remoting.housekeeping import ConnectionTable
from cometmq.remoting.limits import Limits
from cometmq.remoting.loop import stop_accepting
from cometmq.remoting.networks import network_of
from cometmq.remoting.opening import Openings, Tls
from cometmq.remoting.tick import Tick

BACKLOG = 1024


class RemotingServer:
    """Serves `handlers` (request code -> handler) on one or more addresses. Made inside the running loop.

    A handler runs inline as `handler(connection, request)` and returns the response frame, or None if it
    answers later (`connection.respond`) or never; or it is an async function, which runs as a task and gets
    its body as bytes. What an inline handler keeps of `request.body` it must copy: the bytes are gone when
    it returns. CommandError(code, remark) is answered so; any other exception with code 1 and "<type>:
    <message>".

    tls: connections may speak TLS, or must; those made in memory never do.

    shortcuts: by the first 12 bytes of a JSON header, what may take a request before it is decoded.
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
        self._table = ConnectionTable(self._loop, scan_s)
        self._listeners: list[Callable[[], None]] = []  # each ends when it is called
        self._stopped = False

    @property
    def connections(self) -> set[Connection]:
        """The open connections."""
        return self._table.connections

    def divert(self, codes: Collection[int], handler: Handler) -> None:
        """From now on `handler` gets the requests of these codes, as far as they are served here. No
        shortcut is taken meanwhile. Without codes each goes to its own handler again.

        What is not diverted pays nothing for it.
        """
        diverted = dict.fromkeys(self._handlers.keys() & set(codes), handler)
        self._dispatcher.handlers = self._handlers | diverted
        self._shortcuts.clear()
        if not diverted:
            self._shortcuts.update(self._all_shortcuts)

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 takes a free one. Returns the port. May be called again for another address."""
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

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open go on."""
        for close in self._listeners:
            close()
        self._listeners.clear()

    async def stop(self, drain_s: float = 3.0) -> None:
        """Stop listening, let async handlers finish for up to `drain_s`, send what is queued, close all."""
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
        # A bound method is called faster than an object with __call__.
        return Connection(
            self._dispatcher.__call__,
            self.tick,
            self._limits,
            self._on_open,
            self._on_close,
            shortcuts=self._shortcuts,
        )

    def _on_open(self, connection: Connection) -> None:
        if self._stopped:  # it was accepted before the listeners were closed
            connection.abort()
            return
        self._table.add(connection)
        if self._user_on_open is not None:
            self._user_on_open(connection)

    def _on_close(self, connection: Connection) -> None:
        self._table.discard(connection)
        if self._user_on_close is not None:
            self._user_on_close(connection)
