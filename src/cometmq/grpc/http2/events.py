"""The events that a connection reports to its application."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class HeadersReceived(msgspec.Struct, frozen=True, gc=False):
    """A request has begun. With `end_stream` it has no data."""

    stream_id: int
    headers: list[tuple[bytes, bytes]]
    end_stream: bool


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """Data of a request. The application must report it by `consumed`, to receive more.

    With `end_stream` the request is complete; the data may then be empty. Trailers of a request are dropped.
    """

    stream_id: int
    data: bytes
    end_stream: bool


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """A stream has ended early: the peer reset it, or violated the protocol on it."""

    stream_id: int
    error_code: int


class ConnectionEnded(msgspec.Struct, frozen=True, gc=False):
    """The connection has ended with all its streams. The caller writes the output and closes the socket."""

    error_code: int
    reason: str


Event: TypeAlias = HeadersReceived | DataReceived | StreamReset | ConnectionEnded
