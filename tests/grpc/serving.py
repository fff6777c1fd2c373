"""A gRPC server for tests, and grpcio as its client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import h2.config
import h2.connection
import h2.events

from cometmq.grpc.listener.server import GrpcServer
from cometmq.grpc.rpc.calls import Handler
from cometmq.grpc.rpc.messages import SERVICE, messages

M = messages()


@asynccontextmanager
async def serving(handlers: dict[str, Handler], **options: Any) -> AsyncIterator[tuple[GrpcServer, int]]:
    """Serve handlers on a free port of 127.0.0.1. The value is the server and its port."""
    server = GrpcServer(handlers, **options)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop()


class Client:
    """A channel of grpcio with RocketMQ's methods."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.send = self.unary("SendMessage")

    def unary(self, name: str) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{name}", _bytes, _from(f"{name}Response"))

    def receive(self, *args: Any, **more: Any) -> Any:
        method = self.channel.unary_stream(
            f"/{SERVICE}/ReceiveMessage", _bytes, _from("ReceiveMessageResponse")
        )
        return method(*args, **more)

    def telemetry(self, **more: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/Telemetry", _bytes, _from("TelemetryCommand"))(**more)


@asynccontextmanager
async def client(port: int, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[Client]:
    target = f"127.0.0.1:{port}"
    options = [
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.max_send_message_length", 64 << 20),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options)
    async with channel:
        yield Client(channel)


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _from(name: str) -> Any:
    return getattr(M, name).FromString


def sending(body: bytes = b"x", count: int = 1) -> Any:
    """Return a request with messages to the topic Orders."""
    topic = M.Resource(name="Orders")
    return M.SendMessageRequest(messages=[M.Message(topic=topic, body=body) for _ in range(count)])


def stored(body: bytes) -> Any:
    """Return the response to a send: an entry whose message id is the size of the body."""
    return M.SendMessageResponse(entries=[M.SendResultEntry(message_id=str(len(body)))])


class Peer:
    """A client of PyPI's h2 over a socket: it sends what a gRPC library would not."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.events: list[Any] = []
        self.reads_data = True  # Whether received data opens the windows again

    def request(
        self, *data: bytes, path: str = f"/{SERVICE}/SendMessage", end: bool = True, **more: str
    ) -> int:
        """Queue a request, and return its stream id. `more` are further or other headers, with _ for -."""
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-").replace("--", ":"): value for name, value in more.items()},
        }
        stream = self.http.get_next_available_stream_id()
        self.http.send_headers(stream, list(headers.items()), end_stream=end and not data)
        for number, each in enumerate(data, 1):
            self.http.send_data(stream, each, end_stream=end and number == len(data))
        return stream

    def send(self) -> None:
        """Send what is queued."""
        self.writer.write(self.http.data_to_send())

    async def read(self) -> bool:
        """Read from the socket once. Return False at its end."""
        data = await self.reader.read(65536)
        for event in self.http.receive_data(data):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived) and self.reads_data:
                self.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.send()
        return bool(data)

    async def response(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Wait for the end of a response, and return its headers with its trailers, and its data."""
        while not any(
            isinstance(event, h2.events.StreamEnded | h2.events.StreamReset) and event.stream_id == stream
            for event in self.events
        ):
            assert await self.read(), "the connection was closed"
        headers: dict[str, str] = {}
        data = b""
        for event in self.events:
            if getattr(event, "stream_id", None) == stream:
                headers |= dict(getattr(event, "headers", ()))
                data += getattr(event, "data", b"") if isinstance(event, h2.events.DataReceived) else b""
        return headers, data

    async def closed(self) -> None:
        """Read until the server closes the connection."""
        try:
            while await self.read():
                pass
        except ConnectionError:
            pass  # the server has aborted it


@asynccontextmanager
async def connected(port: int, *first: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """Connect a Peer, which has sent its preface, after the parts of `first`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    for part in first:
        writer.write(part)
        await asyncio.sleep(0.01)  # so that the server reads it alone; nothing depends on that
    peer = Peer(reader, writer)
    peer.http.initiate_connection()
    peer.send()
    try:
        yield peer
    finally:
        writer.transport.abort()
