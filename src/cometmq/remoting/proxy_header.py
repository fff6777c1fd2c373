"""HAProxy's PROXY header (versions 1 and 2), in which load balancers name a client before its first byte."""

from __future__ import annotations

import ipaddress
import struct
from typing import Any, NamedTuple

from cometmq.errors import FrameError
from cometmq.text import shortened

MAX_HEADER = 4096
"""The maximum size of a header of version 2. Its addresses take 36 bytes, the rest is for extensions."""

_V1 = b"PROXY "
_V1_MAX_LINE = 107
_V2 = b"\r\n\r\n\0\r\nQUIT\n"
_V2_FIXED = 16  # Bytes before the addresses
_V2_PROXY = 0x21  # Version 2, command PROXY. The command LOCAL is a connection of the proxy itself.
_V2_LOCAL = 0x20
_V2_TCP = {0x11: 4, 0x21: 16}  # Bytes of one address, by family and transport


class ProxyHeader(NamedTuple):
    """A header: its size in bytes, and the client's host and port unless the proxy does not name them."""

    size: int
    client: tuple[str, int] | None


NO_HEADER = ProxyHeader(0, None)


def read_proxy_header(data: bytes) -> ProxyHeader | None:
    """Return the header of a connection, NO_HEADER, or None if more bytes are needed. Raises FrameError."""
    if data.startswith(_V2):
        return _read_v2(data)
    if data.startswith(_V1):
        line, end, _ = data[:_V1_MAX_LINE].partition(b"\r\n")
        if end:
            return ProxyHeader(len(line) + 2, _client_of_line(line))
        if len(data) >= _V1_MAX_LINE:
            raise FrameError(f"a PROXY line has no end within {_V1_MAX_LINE} bytes")
        return None
    return None if _V1.startswith(data) or _V2.startswith(data) else NO_HEADER


def proxy_header(peer: Any) -> bytes:
    """Return the header of version 2 that names the client with this socket name."""
    if not isinstance(peer, tuple):
        return _V2 + struct.pack(">BBH", _V2_LOCAL, 0, 0)
    address, port = ipaddress.ip_address(peer[0].partition("%")[0]), peer[1]
    size = len(address.packed)
    family = 0x11 if address.version == 4 else 0x21
    head = _V2 + struct.pack(">BBH", _V2_PROXY, family, 2 * size + 4)
    return head + address.packed + bytes(size) + struct.pack(">HH", port, 0)


def is_proxied(data: bytes) -> bool:
    """Return whether the first bytes of a connection begin with a header of version 2."""
    return data.startswith(_V2)


def _client_of_line(line: bytes) -> tuple[str, int] | None:
    words = line.decode("latin-1").split(" ")
    if words[1] == "UNKNOWN":
        return None
    try:
        _, family, source, _, port, _ = words
        address = ipaddress.ip_address(source)
        if family == f"TCP{address.version}" and port.isdigit() and int(port) < 1 << 16:
            return str(address), int(port)
    except ValueError:
        pass  # the error below
    raise FrameError(f"a PROXY line is invalid: {shortened(repr(line))}")


def _read_v2(data: bytes) -> ProxyHeader | None:
    if len(data) < _V2_FIXED:
        return None
    command, family, length = struct.unpack_from(">BBH", data, len(_V2))
    size = _V2_FIXED + length
    if command not in (_V2_PROXY, _V2_LOCAL) or size > MAX_HEADER:
        raise FrameError(f"a PROXY header has command {command:#x} and {size} bytes")
    if len(data) < size:
        return None
    address_size = _V2_TCP.get(family)
    if command == _V2_LOCAL or address_size is None:
        return ProxyHeader(size, None)
    if length < 2 * address_size + 4:
        raise FrameError(f"the addresses of a PROXY header take {length} bytes")
    address = ipaddress.ip_address(data[_V2_FIXED : _V2_FIXED + address_size])
    (port,) = struct.unpack_from(">H", data, _V2_FIXED + 2 * address_size)
    return ProxyHeader(size, (str(address), port))
