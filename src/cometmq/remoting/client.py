"""The calling side: one connection per address, made when first needed and again after it was lost."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, cast

from cometmq.errors import ConnectError, RequestTimeout
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.frame import Frame
from cometmq.remoting.connection import Connection
from cometmq.remoting.dispatch import Dispatcher, Handler
from cometmq.remoting.housekeeping import ConnectionTable
from cometmq.remoting.limits import Limits
from cometmq.remoting.networks import network_of
from cometmq.remoting.tick import Tick
from cometmq.text import seconds, shortened


def parse_addr(addr: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port". Raises ConnectError if it is neither."""
    parsed = parse_address(addr)
    if parsed is None:
        raise ConnectError(shortened(addr), "an address is host:port")
    return parsed


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror | ssl.SSLError):
        return error.strerror or str(error)  # their numbers are none of the system's
    # asyncio puts its own words into strerror; the system's say what happened.
    return os.strerror(error.errno) if error.errno else str(error)


class RemotingClient:
    """Calls servers by "host:port". To be made inside the running loop.

    handlers: requests that servers send to us (request code -> handler), as in RemotingServer. outgoing:
    called with each request of ours before it leaves, and may change it. address_map: what is connected in
    the place of an address, `host:port` or a host alone on both sides; everybody goes on calling it by its
    name.
    """

    def __init__(
        self,
        handlers: Mapping[int, Handler] | None = None,
        *,
        default: Handler | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        limits: Limits | None = None,
        tick: Tick | None = None,
        ssl_context: ssl.SSLContext | None = None,
        scan_s: float = 1.0,
        outgoing: Callable[[Frame], None] | None = None,
        address_map: Mapping[str, str] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.tick = tick if tick is not None else Tick(self._loop)
        self._dispatcher = Dispatcher(handlers or {}, default)
        self._user_on_open = on_open
        self._user_on_close = on_close
        self._limits = limits if limits is not None else Limits()
        self._ssl_context = ssl_context
        self._outgoing = outgoing
        self._address_map = dict(address_map or {})
        self._table = ConnectionTable(self._loop, scan_s)
        self._by_addr: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    def connection(self, addr: str) -> Connection | None:
        """The open connection to `addr`, if there is one."""
        connection = self._by_addr.get(addr)
        return None if connection is None or connection.closed else connection

    async def connect(self, addr: str, timeout_s: float | None = None) -> Connection:
        """The connection to `addr`, made if need be; callers waiting for the same address share one attempt.

        Raises ConnectError if it is refused, or does not come about within `timeout_s` (at most the connect
        time-out).
        """
        connection = self._by_addr.get(addr)
        if connection is not None and not connection.closed:
            return connection
        if self._closed:
            raise ConnectError(addr, "the client is closed")
        task = self._connecting.get(addr)
        if task is None:
            task = self._loop.create_task(self._dial(addr))
            self._connecting[addr] = task
            task.add_done_callback(lambda done: self._dialled(addr, done))
        limit = self._limits.connect_timeout_s
        wait_s = limit if timeout_s is None else min(timeout_s, limit)
        try:
            # Shielded: a caller that gives up must not take the attempt from the others.
            return await asyncio.wait_for(asyncio.shield(task), wait_s)
        except TimeoutError:
            raise ConnectError(addr, f"no connection within {seconds(wait_s)}") from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                raise ConnectError(addr, "the client is closed") from None  # the attempt was cancelled
            raise

    async def call(self, addr: str, frame: Frame, timeout_s: float = 3.0) -> Frame:
        """Send a request and await its answer, connecting first if need be; `timeout_s` covers both.

        Raises ConnectError (nothing was sent), SendFailed (the connection closed: the server may have got the
        request) or RequestTimeout.
        """
        connection = self._by_addr.get(addr)
        if connection is None or connection.closed:
            begun = self._loop.time()
            connection = await self.connect(addr, timeout_s)
            left_s = timeout_s - (self._loop.time() - begun)
            if left_s <= 0:
                raise RequestTimeout(addr, frame.code, timeout_s)
            timeout_s = left_s
        return await connection.request(frame, timeout_s)

    async def close(self, grace_s: float = 3.0) -> None:
        """Close all connections; outstanding calls fail. The client cannot be used any more."""
        self._closed = True
        running: list[asyncio.Task[Any]] = [*self._connecting.values(), *self._dispatcher.tasks]
        for task in running:
            task.cancel()
        if running:
            await asyncio.gather(*running, return_exceptions=True)
        self.tick.run_now()
        await self._table.close_all(grace_s)

    async def _dial(self, addr: str) -> Connection:
        host, port = parse_addr(self._address_map.get(addr, addr))
        if addr not in self._address_map:
            host = self._address_map.get(host, host)
        limit_s = self._limits.connect_timeout_s
        network = network_of(host)
        try:
            if network is not None:
                return cast(Connection, network.connect(lambda: self._make_connection(addr), port))
            async with asyncio.timeout(limit_s):
                _, connection = await self._loop.create_connection(
                    lambda: self._make_connection(addr),
                    host,
                    port,
                    ssl=self._ssl_context,
                    server_hostname=host if self._ssl_context is not None else None,
                )
        except TimeoutError:
            raise ConnectError(addr, f"no connection within {seconds(limit_s)}") from None
        except OSError as error:
            raise ConnectError(addr, _reason(error)) from error
        except Exception as error:
            # What resolvers and transports make of an odd address; whoever calls knows ConnectError only.
            raise ConnectError(addr, repr(error)) from error
        return connection

    def _dialled(self, addr: str, task: asyncio.Task[Connection]) -> None:
        self._connecting.pop(addr, None)
        if not task.cancelled():
            task.exception()  # seen: its waiters may have given up

    def _make_connection(self, addr: str) -> Connection:
        return Connection(
            self._dispatcher, self.tick, self._limits, self._on_open, self._on_close, addr,
            outgoing=self._outgoing,
        )  # fmt: skip

    def _on_open(self, connection: Connection) -> None:
        self._table.add(connection)
        self._by_addr[connection.addr] = connection
        if self._user_on_open is not None:
            self._user_on_open(connection)

    def _on_close(self, connection: Connection) -> None:
        self._table.discard(connection)
        if self._by_addr.get(connection.addr) is connection:
            del self._by_addr[connection.addr]
        if self._user_on_close is not None:
            self._user_on_close(connection)
