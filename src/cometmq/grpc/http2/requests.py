"""The rules for the headers of a request (RFC 9113, section 8)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from cometmq.grpc.http2.errors import ErrorCode, Http2Error
from cometmq.grpc.http2.hpack import ENTRY_OVERHEAD, Header

_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_KNOWN = _REQUIRED | {b":authority"}
_OF_CONNECTIONS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_NAME_BYTES = bytes({*range(0x21, 0x7F)} - {*b"ABCDEFGHIJKLMNOPQRSTUVWXYZ:"})
_NO_VALUE_BYTES = b"\0\r\n"


def check_request(stream_id: int, headers: Sequence[Header], max_size: int) -> None:
    """Check the headers of a request.

    Args:
        stream_id: The request's stream, for errors.
        headers: The headers.
        max_size: The maximum size in bytes, as SETTINGS_MAX_HEADER_LIST_SIZE counts it.

    Raises:
        Http2Error: The request is malformed or too large.
    """
    names, values = zip(*headers, strict=True) if headers else ((), ())
    size, problem = sum(map(len, values)) + ENTRY_OVERHEAD * len(values), None
    if size <= max_size:
        of_names, problem = _checked_names(names)
        size += of_names
    if size > max_size:
        reason = f"the headers are larger than {max_size} bytes"
        raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, reason, stream_id)
    if not has_legal_bytes(values):
        problem = "a header's value has an illegal character"
    elif b"te" in names and (b"te", b"trailers") not in headers:
        problem = "the header te is not trailers"
    if problem is not None:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, problem, stream_id)


def has_legal_bytes(values: Iterable[bytes]) -> bool:
    """Return whether values of headers contain no bytes that are not allowed there."""
    text = b"".join(values)
    return len(text.translate(None, _NO_VALUE_BYTES)) == len(text)


@lru_cache(maxsize=64)
def _checked_names(names: tuple[bytes, ...]) -> tuple[int, str | None]:
    """Return the size of the names in bytes, and what is wrong with them, or None.

    Cached, because a client's requests have equal names.
    """
    return sum(map(len, names)), _problem_of_names(names)


def _problem_of_names(names: tuple[bytes, ...]) -> str | None:
    """Return what is wrong with the names, or None."""
    special = 0
    while special < len(names) and names[special].startswith(b":"):
        special += 1
    unique = set(names[:special])
    if len(unique) < special or not _REQUIRED <= unique <= _KNOWN:
        return "the pseudo-headers are not one each of :method, :scheme, :path and perhaps :authority"
    plain = names[special:]
    if b"".join(plain).translate(None, _NAME_BYTES) or not all(plain):
        return "a header's name has an illegal character, is empty, or is a pseudo-header after others"
    if not _OF_CONNECTIONS.isdisjoint(plain):
        return "a header belongs to HTTP/1.1 connections"
    return None
