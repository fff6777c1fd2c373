"""gRPC's status codes, the headers that end a call, and deadlines as text."""

from __future__ import annotations

from enum import IntEnum
from urllib.parse import quote

from cometmq.errors import CometError
from cometmq.grpc.rpc.enums import Code
from cometmq.text import shortened

Headers = tuple[tuple[bytes, bytes], ...]

MAX_TEXT_LENGTH = 512
"""Maximum length of a status text. Percent-encoded, it must fit into the 8 KiB that clients accept."""
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8


GrpcStatus = IntEnum(
    "GrpcStatus",
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE "
    "DATA_LOSS UNAUTHENTICATED",
    start=0,
)
"""The status with which a call ends."""


class RpcError(CometError):
    """A call ends with a gRPC status other than OK, without a response."""

    status: GrpcStatus
    problem: str

    def __str__(self) -> str:
        return f"{self.status.name}: {self.problem}"


class ServiceError(CometError):
    """A request is answered with a `Status` of RocketMQ; for gRPC, the call succeeds."""

    code: Code
    problem: str

    def __str__(self) -> str:
        return f"{self.code.name}: {self.problem}"


OK_TRAILERS: Headers = ((b"grpc-status", b"0"),)


def trailers(status: GrpcStatus, text: str) -> Headers:
    """Return the headers that end a call. The text is shortened."""
    if status is GrpcStatus.OK:
        return OK_TRAILERS
    message = quote(shortened(text, MAX_TEXT_LENGTH), safe=_UNESCAPED, errors="replace").encode()
    return ((b"grpc-status", b"%d" % status), (b"grpc-message", message))


def timeout_s(value: bytes) -> float:
    """Return the seconds of a `grpc-timeout` header. Raises RpcError."""
    digits, unit = value[:-1], value[-1:]
    if unit not in _SECONDS or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        problem = f"grpc-timeout is {value!r}, not 1 to {_MAX_TIMEOUT_DIGITS} digits and a unit"
        raise RpcError(GrpcStatus.INTERNAL, problem)
    return int(digits) * _SECONDS[unit]
