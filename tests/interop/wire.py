"""The least of RocketMQ's remoting protocol that a probe needs.

Written apart from ``cometmq.protocol`` on purpose: what checks our servers must not lean on what it checks.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

GET_ROUTEINFO_BY_TOPIC = 105
GET_BROKER_CLUSTER_INFO = 106
_opaque = iter(range(1, 2**31))


def call(
    port: int,
    code: int,
    ext: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    host: str = "127.0.0.1",
    timeout_s: float = 5.0,
) -> tuple[dict[str, Any], bytes]:
    """One request over a connection of its own; returns (response header, response body)."""
    header = {
        "code": code,
        "language": "PYTHON",
        "version": 407,
        "opaque": next(_opaque),
        "flag": 0,
        "extFields": ext or {},
        "serializeTypeCurrentRPC": "JSON",
    }
    head = json.dumps(header).encode()
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.sendall(struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body)
        (total,) = struct.unpack(">I", _exactly(connection, 4))
        payload = _exactly(connection, total)
    (word,) = struct.unpack(">I", payload[:4])
    length = word & 0xFFFFFF
    return json.loads(payload[4 : 4 + length]), payload[4 + length :]


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
