"""The answer of a port that does not serve HTTP/2 to a client that begins with HTTP/2.

RocketMQ 5.x clients use gRPC, and users often give them the address of a name server or broker.
"""

from __future__ import annotations

import struct

PREFACE_WORD = int.from_bytes(b"PRI ", "big")
"""The length of a frame, as remoting reads the first bytes of HTTP/2 ("PRI * HTTP/2.0")."""

TEXT = (
    "This port serves RocketMQ's remoting protocol, not gRPC. 5.x clients connect to the port that the "
    "broker's setting grpcPort names, usually 8081."
)

_SETTINGS, _GOAWAY = 4, 7
_PROTOCOL_ERROR = 1


def _frame(kind: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame for stream 0, without flags."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, 0, 0) + payload


# gRPC libraries show the text of a GOAWAY frame in their errors, if the SETTINGS frame precedes it.
ANSWER = _frame(_SETTINGS, b"") + _frame(_GOAWAY, struct.pack(">II", 0, _PROTOCOL_ERROR) + TEXT.encode())
