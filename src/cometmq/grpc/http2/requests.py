"""The rules for the headers of a request (RFC 9113, section 8)."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.grpc.http2.hpack import ENTRY_OVERHEAD, Header

_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_KNOWN = _REQUIRED | {b":authority"}
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_NAME_BYTES = bytes({*range(0x21, 0x7F)} - {*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:"})
_NO_VALUE_BYTES = b"\0\r\n"


def list_size(headers: Sequence[Header]) -> int:
    """Return the size of a header list as SETTINGS_MAX_HEADER_LIST_SIZE counts it."""
    return sum([len(name) + len(value) for name, value in headers]) + ENTRY_OVERHEAD * len(headers)


def problem_of(headers: Sequence[Header]) -> str | None:
    """Return why a request with these headers is malformed, or None if it is not."""
    names = [name for name, _ in headers]
    special = 0
    while special < len(names) and names[special].startswith(b":"):
        special += 1
    unique = set(names[:special])
    if len(unique) < special or not _REQUIRED <= unique <= _KNOWN:
        return "the pseudo-headers are not one each of :method, :scheme, :path and perhaps :authority"
    plain = names[special:]
    if b"".join(plain).translate(None, _NAME_BYTES) or not all(plain):
        return "a header's name has an illegal character, is empty, or is a pseudo-header after others"
    values = b"".join([value for _, value in headers])
    if len(values.translate(None, _NO_VALUE_BYTES)) < len(values):
        return "a header's value has an illegal character"
    if not _OF_CONNECTIONS.isdisjoint(plain):
        return "a header belongs to HTTP/1.1 connections"
    if b"te" in plain and any(name == b"te" and value != b"trailers" for name, value in headers):
        return "the header te is not trailers"
    return None
