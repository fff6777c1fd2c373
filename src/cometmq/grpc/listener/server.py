"""The listener of the gRPC endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from cometmq import logs
from cometmq.grpc.listener.connection import GOAWAY_S, GrpcConnection
from cometmq.grpc.listener.dispatch import Dispatcher
from cometmq.grpc.listener.forwards import Address, Forward, Forwards
from cometmq.grpc.listener.self_signed import SelfSigned
from cometmq.grpc.rpc.calls import HTTP, Handler, Kind, Method
from cometmq.grpc.rpc.messages import service_methods
from cometmq.grpc.rpc.status import GrpcStatus
from cometmq.remoting import BACKLOG, ConnectionTable, Limits, Openings, ServerTls, Tick, stop_accepting


class GrpcServer:
    """Serves the methods of RocketMQ's gRPC API. It must be created inside the running loop.

    The handler of a unary method is called as `handler(call, request)`. It returns the response message, or
    None if it responds later (`call.respond`). The handler of a server stream is called in the same way; it
    sends messages (`call.send`) and ends the call (`call.finish`), now or later. The handler of a bidi method
    is called as `handler(call)` and sets the call's callbacks.

    A handler may also be an async function: it runs as a task that is cancelled with its call, and its end is
    the end of a stream. A ServiceError becomes a response with that status, an RpcError becomes the status of
    the call. For any other exception the call ends with INTERNAL, and the exception is logged.

    Deadlines are checked every `scan_s` seconds, as clients give up by themselves.

    Args:
        handlers: The handlers by method name, for instance "SendMessage". Other methods are UNIMPLEMENTED.
        limits: Limits of connections; `max_frame` is the maximum size of a request.
        tick: The tick of the broker's servers.
        tls: The TLS of the connections, optional or required.
        make_tls: Creates the TLS when a client uses it for the first time, if `tls` is None (self_signed.py).
        gateway: Returns the method for requests that are not gRPC, for the methods by path. None: they are
            refused.
        is_proxy: Returns whether a connection of a host may begin with a PROXY header, which names the
            client's address. Other clients could name any address.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        on_close: Callable[[GrpcConnection], None] | None = None,
        limits: Limits | None = None,
        tick: Tick | None = None,
        tls: ServerTls | None = None,
        make_tls: Callable[[], Coroutine[Any, Any, SelfSigned]] | None = None,
        gateway: Callable[[Mapping[bytes, Method]], Method] | None = None,
        is_proxy: Callable[[str], bool] | None = None,
        scan_s: float = 1.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick = tick if tick is not None else Tick(self._loop)
        self._methods = service_methods(handlers)
        if gateway is not None:
            self._methods[HTTP] = gateway(self._methods)
        self._dispatcher = Dispatcher()
        self._user_on_close = on_close
        self._limits = limits if limits is not None else Limits()
        self._log_limit = logs.LogLimiter()
        self._make: Callable[[], asyncio.BufferedProtocol] = self._make_connection
        self._openings: Openings | None = None
        if tls is not None or make_tls is not None or is_proxy is not None:
            make_proxied = self._make_connection if is_proxy is not None else None
            self._make = self._openings = Openings(
                tls,
                self._limits,
                self._make_connection,
                make_proxied,
                make_tls,
                is_proxy,
            )
        self.forwards: Forwards | None = None
        self._table: ConnectionTable[GrpcConnection] = ConnectionTable(self._loop, scan_s)
        self._listeners: list[asyncio.Server] = []
        self._stopped = False

    def forward(
        self,
        leader: Callable[[], str | None],
        endpoint_of: Callable[[str], Awaitable[Address]],
        names_clients: bool,
    ) -> None:
        """Forward connections while another broker is the leader (see `Forwards`)."""
        self.forwards = Forwards(leader, endpoint_of, self._make, names_clients)

    @property
    def connections(self) -> set[GrpcConnection]:
        """The open connections."""
        return self._table.connections

    @property
    def ended(self) -> Mapping[tuple[str, int], int]:
        """The number of calls that have ended, by method and outcome (`Call.outcome`)."""
        return self._dispatcher.ended

    async def start(self, host: str, port: int) -> int:
        """Listen on one more address and return the port; port 0 selects a free one."""
        listener = await self._loop.create_server(
            self._accept, host, port, backlog=BACKLOG, reuse_address=True
        )
        self._listeners.append(listener)
        return int(listener.sockets[0].getsockname()[1])

    async def stop(self, drain_s: float = 3.0) -> None:
        """Stop listening, end streams, wait up to `drain_s` seconds for unary calls, close all connections.

        Clients are asked to open no more calls before further calls are refused, so that none is lost.
        """
        for listener in self._listeners:
            stop_accepting(listener)
        self._listeners.clear()
        self._stopped = True
        if self._openings is not None:
            await self._openings.close_all()
        if self.forwards is not None:
            await self.forwards.close_all()
        self._goaway()
        if not await self._table.wait_empty(GOAWAY_S):
            self._goaway()
            self._end_calls((Kind.SERVER_STREAM, Kind.BIDI))
            if not await self._table.wait_empty(drain_s):
                self._end_calls(tuple(Kind))
        self._tick.run_now()
        await self._table.close_all(drain_s)
        await asyncio.gather(*self._dispatcher.tasks, return_exceptions=True)

    def _goaway(self) -> None:
        for connection in list(self._table.connections):
            connection.goaway()

    def _end_calls(self, kinds: tuple[Kind, ...], why: str = "the server is stopping") -> None:
        for connection in list(self._table.connections):
            connection.calls.end_all(kinds, GrpcStatus.UNAVAILABLE, why)

    def leader_changed(self) -> None:
        """Close connections that this broker may no longer serve or forward, after the calls in progress."""
        if self.forwards is None:
            return
        self.forwards.leader_changed()
        if self.forwards.leader() is not None:
            self._goaway()
            self._end_calls((Kind.BIDI,), "this broker is no longer the leader")

    def _accept(self) -> asyncio.BaseProtocol:
        if self.forwards is not None and self.forwards.leader() is not None:
            return Forward(self.forwards)
        return self._make()

    def _make_connection(self, client: tuple[str, int] | None = None) -> GrpcConnection:
        return GrpcConnection(
            self._methods,
            self._dispatcher,
            self._tick,
            self._limits,
            self._log_limit,
            self._on_open,
            self._on_close,
            client,
        )

    def _on_open(self, connection: GrpcConnection) -> None:
        # Connections accepted before a stop or another leader are aborted, as nothing closes them later.
        if self._stopped or (self.forwards is not None and self.forwards.leader() is not None):
            connection.abort()
            return
        self._table.add(connection)

    def _on_close(self, connection: GrpcConnection) -> None:
        self._table.discard(connection)
        if self._user_on_close is not None:
            self._user_on_close(connection)
