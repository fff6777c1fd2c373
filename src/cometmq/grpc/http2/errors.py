"""HTTP/2's error codes, and the error for what a peer may not do."""

from __future__ import annotations

from enum import IntEnum

from cometmq.errors import ProtocolError

ErrorCode = IntEnum(
    "ErrorCode",
    "NO_ERROR PROTOCOL_ERROR INTERNAL_ERROR FLOW_CONTROL_ERROR SETTINGS_TIMEOUT STREAM_CLOSED "
    "FRAME_SIZE_ERROR REFUSED_STREAM CANCEL COMPRESSION_ERROR CONNECT_ERROR ENHANCE_YOUR_CALM "
    "INADEQUATE_SECURITY HTTP_1_1_REQUIRED",
    start=0,
)
"""The codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""


class Http2Error(ProtocolError):
    """The peer has violated the protocol or a limit. The stream ends, or with id 0 the connection."""

    code: ErrorCode
    reason: str
    stream_id: int = 0

    def __str__(self) -> str:
        return f"{self.code.name}: {self.reason}"
