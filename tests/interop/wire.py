"""The least of RocketMQ's remoting protocol that a probe needs.

Written apart from ``cometmq.protocol`` on purpose: what checks our servers must not lean on what it checks.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Self

GET_BROKER_RUNTIME_INFO = 28
GET_ROUTEINFO_BY_TOPIC = 105
GET_BROKER_CLUSTER_INFO = 106
_opaque = iter(range(1, 2**31))


Answer = tuple[dict[str, Any], bytes]


class Connection:
    """One connection that asks one thing at a time."""

    def __init__(self, port: int, *, timeout_s: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Answer:
        """Send one request and return (response header, response body)."""
        header = {
            "code": code,
            "language": "JAVA",
            "version": 407,
            "opaque": next(_opaque),
            "flag": 0,
            "extFields": ext or {},
            "serializeTypeCurrentRPC": "JSON",
        }
        head = json.dumps(header).encode()
        self._socket.sendall(struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body)
        while True:
            (total,) = struct.unpack(">I", _exactly(self._socket, 4))
            payload = _exactly(self._socket, total)
            (word,) = struct.unpack(">I", payload[:4])
            head, rest = payload[4 : 4 + (word & 0xFFFFFF)], payload[4 + (word & 0xFFFFFF) :]
            answer = json.loads(head) if word >> 24 == 0 else _binary(head)
            if answer["flag"] & 1 and answer["opaque"] == header["opaque"]:
                return answer, rest


def call(port: int, code: int, ext: dict[str, str] | None = None, body: bytes = b"") -> Answer:
    """One request over a connection of its own."""
    with Connection(port) as connection:
        return connection.call(code, ext, body)


def _binary(head: bytes) -> dict[str, Any]:
    """The binary header: a 5.x server that was told to write it answers so even to JSON."""
    code, _, version, opaque, flag, size = struct.unpack_from(">hBhiii", head)
    remark, at = head[17 : 17 + size].decode(), 17 + size
    end = at + 4 + int.from_bytes(head[at : at + 4])
    at += 4
    ext = {}
    while at < end:
        key_end = at + 2 + int.from_bytes(head[at : at + 2])
        value_end = key_end + 4 + int.from_bytes(head[key_end : key_end + 4])
        ext[head[at + 2 : key_end].decode()] = head[key_end + 4 : value_end].decode()
        at = value_end
    fields = {"code": code, "version": version, "opaque": opaque, "flag": flag, "remark": remark}
    return {**fields, "extFields": ext}


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("closed in the middle of a frame")
        data += piece
    return bytes(data)


def listens(port: int) -> bool:
    """Whether somebody accepts connections on this port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def knows_broker(namesrv_port: int, broker_name: str) -> bool:
    """Whether the name server there has the broker in its tables."""
    try:
        header, body = call(namesrv_port, GET_BROKER_CLUSTER_INFO)
    except OSError:
        return False
    return header["code"] == 0 and f'"{broker_name}"'.encode() in body


def runtime_info(port: int) -> dict[str, str]:
    """What a broker says about itself; nothing while it starts."""
    _, body = call(port, GET_BROKER_RUNTIME_INFO)
    return dict(json.loads(body)["table"]) if body else {}
