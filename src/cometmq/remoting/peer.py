"""The other ends of connections: their addresses, and the answer to those that begin with HTTP/2.

RocketMQ 5.x clients use gRPC, and users often give them the address of a name server or broker.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

HTTP2_WORD = int.from_bytes(b"PRI ", "big")
"""The length of a frame, as remoting reads the first bytes of HTTP/2 ("PRI * HTTP/2.0")."""

TEXT = (
    b"This port serves RocketMQ's remoting protocol, not gRPC. 5.x clients connect to the port that the "
    b"broker's setting grpcPort names, usually 8081."
)

_SETTINGS, _GOAWAY, _PROTOCOL_ERROR = 4, 7, 1


def _frame(kind: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame for stream 0, without flags."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, 0, 0) + payload


# gRPC libraries show the text of a GOAWAY frame in their errors, if the SETTINGS frame precedes it.
HTTP2_ANSWER = _frame(_SETTINGS, b"") + _frame(_GOAWAY, struct.pack(">II", 0, _PROTOCOL_ERROR) + TEXT)


def host_of_peer(transport: asyncio.BaseTransport) -> str:
    """Return the IP address of a transport's peer, or "" if there is none."""
    return describe_peer(transport.get_extra_info("peername"))[0].rpartition(":")[0].strip("[]")


def describe_peer(name: Any) -> tuple[str, bytes]:
    """Return the address in a socket name, as the text "ip:port" and in the binary form of records."""
    if not isinstance(name, tuple):
        return "", b"\0" * 8
    host, port = name[0], name[1]
    if ":" not in host:
        return f"{host}:{port}", socket.inet_aton(host) + port.to_bytes(4, "big")
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):  # An IPv4 peer has an IPv6 address on a dual-stack socket
        return f"{socket.inet_ntoa(packed[12:])}:{port}", packed[12:] + port.to_bytes(4, "big")
    return f"[{host}]:{port}", packed + port.to_bytes(4, "big")
