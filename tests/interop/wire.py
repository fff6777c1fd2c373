"""The minimum of RocketMQ's remoting protocol that a probe needs.

It is independent of ``cometmq.protocol``, because it is used to check our servers.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Self

from tests.kit.raw_peer import header_and_body, raw_frame

GET_BROKER_RUNTIME_INFO = 28
GET_ROUTEINFO_BY_TOPIC = 105
GET_BROKER_CLUSTER_INFO = 106
_opaque = iter(range(1, 2**31))


Answer = tuple[dict[str, Any], bytes]


class Connection:
    """A connection with one request at a time."""

    def __init__(self, port: int, *, timeout_s: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Answer:
        """Send one request and return (response header, response body)."""
        opaque = next(_opaque)
        self._socket.sendall(raw_frame(code, opaque, body, ext=ext or {}, version=407))
        while True:
            (total,) = struct.unpack(">I", _exactly(self._socket, 4))
            answer, rest = header_and_body(_exactly(self._socket, total))
            if answer["flag"] & 1 and answer["opaque"] == opaque:
                return answer, rest


def call(port: int, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Answer:
    """Send one request over a new connection."""
    with Connection(port) as connection:
        return connection.call(code, ext, body)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed in the middle of a frame")
        data += piece
    return bytes(data)


def listens(port: int) -> bool:
    """Return whether this port accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def knows_broker(namesrv_port: int, broker_name: str) -> bool:
    """Return whether the broker is registered with the name server."""
    try:
        header, body = call(namesrv_port, GET_BROKER_CLUSTER_INFO)
    except OSError:
        return False
    return header["code"] == 0 and f'"{broker_name}"'.encode() in body


def runtime_info(port: int) -> dict[str, str]:
    """Return a broker's runtime info; empty while the broker starts."""
    _, body = call(port, GET_BROKER_RUNTIME_INFO)
    return dict(json.loads(body)["table"]) if body else {}
