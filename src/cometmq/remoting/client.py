"""The client side: one connection per address, opened on first use, and again after a loss."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from cometmq.errors import ConnectError, RequestTimeout
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.frame import Frame
from cometmq.remoting.connection import Connection, Handler
from cometmq.remoting.dialing import dial
from cometmq.remoting.dispatch import Dispatcher
from cometmq.remoting.housekeeping import ConnectionTable
from cometmq.remoting.limits import Limits
from cometmq.remoting.memory import network_of
from cometmq.remoting.tick import Tick
from cometmq.text import seconds, shortened

T = TypeVar("T")

STALL_GRACE_S = 0.1
"""The time, in seconds, that a connection attempt gets after its timeout (see `_await_connection`)."""


def parse_addr(addr: str) -> tuple[str, int]:
    """Return the host and port in "host:port" or "[v6]:port". Raises ConnectError for any other text."""
    parsed = parse_address(addr)
    if parsed is None:
        raise ConnectError(shortened(addr), "an address must be host:port")
    return parsed


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror | ssl.SSLError):
        # The `errno` of a `gaierror` or an `SSLError` is not a system error number.
        return error.strerror or str(error)
    # Return the operating system's text for `errno`. The text in `error.strerror` is less precise, because
    # asyncio has replaced it.
    return os.strerror(error.errno) if error.errno else str(error)


async def _await_connection(attempt: asyncio.Future[T], timeout_s: float) -> T:
    """Return the result of a connection attempt, or cancel the attempt and raise TimeoutError.

    An event loop runs timers before it reads sockets. So if the process was suspended for longer than the
    timeout, the timer runs first, although the connection may be established. For this reason the attempt
    gets another STALL_GRACE_S seconds after its timeout.
    """
    try:
        for limit_s in (timeout_s, STALL_GRACE_S):
            done, _ = await asyncio.wait([attempt], timeout=limit_s)
            if done:
                return attempt.result()
        raise TimeoutError
    finally:
        attempt.cancel()


class RemotingClient:
    """Calls servers by "host:port". It must be created inside the running loop.

    Args:
        handlers: Handlers by request code for requests from servers, as in RemotingServer.
        outgoing: Called with each request before it is sent, and may change it.
        address_map: Maps an address to the address to which the client actually connects. Both are
            `host:port`, or both are hosts alone. Callers keep using the original address.
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
        self._table: ConnectionTable[Connection] = ConnectionTable(self._loop, scan_s)
        self._by_addr: dict[str, Connection] = {}
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._closed = False

    def connection(self, addr: str) -> Connection | None:
        """Return the open connection to `addr`, or None if there is none."""
        connection = self._by_addr.get(addr)
        return None if connection is None or connection.closed else connection

    async def connect(self, addr: str, timeout_s: float | None = None) -> Connection:
        """Return the connection to `addr`, and open it if necessary. Concurrent callers share one attempt.

        `timeout_s` is at most the client's connect timeout, the default. Raises ConnectError.
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
            # The connection attempt is shielded, because a timeout of one caller must not cancel the attempt
            # for the other callers.
            return await _await_connection(asyncio.shield(task), wait_s)
        except TimeoutError:
            raise ConnectError(addr, f"no connection within {seconds(wait_s)}") from None
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and caller is not None and not caller.cancelling():
                # `close` cancelled the connection attempt.
                raise ConnectError(addr, "the client is closed") from None
            raise

    async def call(
        self, addr: str, frame: Frame, timeout_s: float = 3.0, *, wait_for_room: bool = False
    ) -> Frame:
        """Send a request to `addr` and return its response. Connect first if necessary.

        Args:
            timeout_s: The timeout in seconds for connecting and for the response together.
            wait_for_room: Whether to wait while the connection is `full`, as small requests do not.

        Raises:
            ConnectError: No connection could be made. Nothing was sent.
            SendFailed: The connection closed. The server may have received the request.
            RequestTimeout: No response arrived in time.
        """
        connection = self._by_addr.get(addr)
        if connection is None or connection.closed or (wait_for_room and connection.full):
            until = self._loop.time() + timeout_s
            connection = await self.connect(addr, timeout_s)
            left_s = until - self._loop.time()
            if left_s <= 0:
                raise ConnectError(addr, f"no connection within {seconds(timeout_s)}")
            if wait_for_room:
                await connection.room(frame.code, left_s)
                left_s = until - self._loop.time()
                if left_s <= 0:
                    raise RequestTimeout(addr, frame.code, timeout_s)
            timeout_s = left_s
        return await connection.request(frame, timeout_s)

    async def close(self, grace_s: float = 3.0) -> None:
        """Close all connections permanently. Outstanding calls fail. `grace_s` is as in `close_all`."""
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
            make = partial(self._make_connection, addr)
            attempt = dial(make, host, port, tls=self._ssl_context)
            _, connection = await _await_connection(self._loop.create_task(attempt), limit_s)
        except TimeoutError:
            raise ConnectError(addr, f"no connection within {seconds(limit_s)}") from None
        except OSError as error:
            raise ConnectError(addr, _reason(error)) from error
        except Exception as error:
            # Resolvers and transports raise various exceptions for invalid addresses. All become
            # ConnectErrors, the only exception that callers handle.
            raise ConnectError(addr, repr(error)) from error
        return connection

    def _dialled(self, addr: str, task: asyncio.Task[Connection]) -> None:
        self._connecting.pop(addr, None)
        if not task.cancelled():
            task.exception()  # Retrieve it: asyncio logs a task's exception that nobody has retrieved

    def _make_connection(self, addr: str) -> Connection:
        return Connection(
            self._dispatcher, self.tick, self._limits, self._on_open, self._on_close, addr,
            outgoing=self._outgoing, dialed=True,
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
