"""HTTP/2's error codes, and the error for what a peer may not do."""

from __future__ import annotations

import enum

from cometmq.errors import ProtocolError


class ErrorCode(enum.IntEnum):
    """The codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class Http2Error(ProtocolError):
    """The peer has violated the protocol or a limit.

    Attributes:
        code: The code to send.
        reason: A description of the violation.
        stream_id: The stream that ends. 0 if the whole connection ends.
    """

    code: ErrorCode
    reason: str
    stream_id: int = 0

    def __str__(self) -> str:
        return f"{self.code.name}: {self.reason}"
