"""Clients of a connection under test: PyPI's h2, and one that writes frames as it is told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import h2.config
import h2.connection
import hpack

from cometmq.grpc.http2 import frames
from cometmq.grpc.http2 import hpack as our_hpack
from cometmq.grpc.http2.connection import Event, Http2Connection, Http2Limits

REQUEST = [
    *(
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/apache.rocketmq.v2.MessagingService/SendMessage"),
    ),
    *((b":authority", b"127.0.0.1:8081"), (b"te", b"trailers"), (b"content-type", b"application/grpc")),
]
RESPONSE = [(b":status", b"200"), (b"content-type", b"application/grpc")]
TRAILERS = [(b"grpc-status", b"0")]


class Pair:
    """A client of PyPI's h2 and the connection under test, joined without a network."""

    def __init__(self, limits: Http2Limits | None = None) -> None:
        self.now = 0.0
        self.server = Http2Connection(limits or Http2Limits(), self.now)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.client.initiate_connection()

    def exchange(self) -> tuple[list[Event], list[Any]]:
        """Pass bytes in both directions until there are none. Returns the events of server and client."""
        received: list[Event] = []
        answered: list[Any] = []
        while True:
            sent = self.client.data_to_send()
            received += self.server.receive(sent, self.now)
            output = b"".join(self.server.take_output())
            answered += self.client.receive_data(output)
            if not sent and not output:
                return received, answered

    def request(self, stream_id: int, data: bytes = b"") -> list[Event]:
        """Send a complete request. Returns the server's events."""
        self.client.send_headers(stream_id, REQUEST, end_stream=not data)
        if data:
            self.client.send_data(stream_id, data, end_stream=True)
        return self.exchange()[0]


class RawPeer:
    """A client that may violate the protocol. It opens the connection as every client does."""

    def __init__(self, limits: Http2Limits | None = None) -> None:
        self.now = 0.0
        self.server = Http2Connection(limits or Http2Limits(), self.now)
        self.encoder = hpack.Encoder()
        self.send(frames.PREFACE, frames.settings({}))
        self.output()

    def send(self, *parts: bytes) -> list[Event]:
        return self.server.receive(b"".join(parts), self.now)

    def headers(self, stream_id: int, *more: tuple[bytes, bytes], end: bool = False) -> bytes:
        """Return the HEADERS frame of a request."""
        return frames.header_frames(stream_id, self.encoder.encode([*REQUEST, *more]), end, 16_384)

    def output(self) -> list[frames.Frame]:
        """Take the server's output, as frames."""
        return frames_of(self.server)


def frames_of(server: Http2Connection) -> list[frames.Frame]:
    reader = frames.FrameReader(1 << 24)
    return list(reader.frames(frames.PREFACE + b"".join(server.take_output())))


def kinds(events: Sequence[object]) -> list[str]:
    return [type(event).__name__ for event in events]


def word(number: int) -> bytes:
    return number.to_bytes(4, "big")


_BLOCKS = [
    b"",
    b"\x82\x86\x84\x41\x01a",
    b"\x82\x86\x84",
    b"\x40\x01a\x01b",
    b"\xbe\xff",
    b"\x3f\xe1\x1f\x82",
    b"\x20",
]
_WORDS = [b"", b"\0\0\0\0", b"\0\0\0\1", b"\0\0\x40\0", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff"]


def hostile_frame(chance: random.Random, number: int) -> bytes:
    """Return any frame. Three of four are legal after about `number` frames of a connection."""
    stream_id = 2 * chance.randint(max(0, number - 20), number + 1) + 1
    if chance.random() < 0.75:
        return chance.choice(
            (
                frames.frame(
                    frames.HEADERS, chance.choice((4, 5)), 2 * number + 1, our_hpack.encode(REQUEST)
                ),
                frames.frame(frames.DATA, chance.choice((0, 0, 1)), stream_id, bytes(chance.randrange(300))),
                frames.window_update(chance.choice((0, stream_id)), chance.randint(1, 100_000)),
                frames.settings({chance.choice((1, 3, 4, 6, 77)): chance.randrange(100_000)}),
                frames.reset(stream_id, 8),
            )
        )
    kind = chance.choice((*range(10), chance.randrange(256)))
    flags = chance.choice((0, 1, 4, 5, chance.randrange(256)))
    payload = chance.choice(
        (
            *(chance.choice(_BLOCKS) + chance.choice(_BLOCKS), chance.choice(_WORDS) + chance.choice(_WORDS)),
            *(chance.randbytes(chance.randrange(40)), bytes(chance.choice((8, 1_000, 16_384, 16_385)))),
            chance.choice((2, 3, 4, 5, 6, 77)).to_bytes(2, "big") + chance.choice(_WORDS[1:]),
        )
    )
    return frames.frame(kind, flags, chance.choice((0, stream_id, chance.getrandbits(31))), payload)
