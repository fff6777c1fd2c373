"""HTTP/2 frames (RFC 9113, section 4 and 6): cutting them out of received bytes, and building them.

3 bytes  length of the payload
1 byte   type
1 byte   flags
4 bytes  a reserved bit, and the stream's id; 0 is the connection
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cometmq.grpc.http2.errors import ErrorCode, Http2Error

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of a client."""

DATA = 0
HEADERS = 1
PRIORITY = 2
RST_STREAM = 3
SETTINGS = 4
PUSH_PROMISE = 5
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
CONTINUATION = 9

END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FIELDS = 0x20

HEADER_TABLE_SIZE = 1
ENABLE_PUSH = 2
MAX_CONCURRENT_STREAMS = 3
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_SIZE = 5
MAX_HEADER_LIST_SIZE = 6

FRAME_HEADER = 9
DEFAULT_WINDOW = 65_535
MIN_MAX_FRAME = 16_384
"""The initial and the smallest value of SETTINGS_MAX_FRAME_SIZE."""
MAX_STREAM_ID = MAX_WINDOW = (1 << 31) - 1

_frame_header = struct.Struct(">HBBBI")
_setting = struct.Struct(">HI")
_word = struct.Struct(">I")

Frame = tuple[int, int, int, bytes]
"""Type, flags, stream id, payload."""


class FrameReader:
    """Cuts received bytes into frames, copying each at most three times, however they are divided."""

    __slots__ = ("_held", "_max_frame", "_needed", "_prefaced")

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._held = bytearray()
        self._needed = 1  # the size of `_held` at which the next step is possible
        self._prefaced = False

    def frames(self, data: bytes | memoryview) -> Iterator[Frame]:
        """Yield the frames that end in `data`. Raises Http2Error for a wrong preface or too long a frame."""
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return
            data = bytes(self._held)
            self._held.clear()
        pos = 0
        if not self._prefaced:
            start = bytes(data[: len(PREFACE)])
            if not PREFACE.startswith(start):
                raise Http2Error(
                    ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface"
                )
            if len(start) == len(PREFACE):
                self._prefaced = True
                pos = len(PREFACE)
        end = len(data)
        self._needed = FRAME_HEADER if self._prefaced else 1
        while self._prefaced and end - pos >= FRAME_HEADER:
            high, low, kind, flags, stream_id = _frame_header.unpack_from(data, pos)
            length = high << 8 | low
            if length > self._max_frame:
                reason = f"a frame has {length} bytes, at most {self._max_frame} are allowed"
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, reason)
            stop = pos + FRAME_HEADER + length
            if stop > end:
                self._needed = FRAME_HEADER + length
                break
            payload = bytes(data[pos + FRAME_HEADER : stop])
            pos = stop
            yield kind, flags, stream_id & MAX_STREAM_ID, payload
        self._held += data[pos:]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    length = len(payload)
    return _frame_header.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def header_frames(stream_id: int, block: bytes, end_stream: bool, max_frame: int) -> bytes:
    """Return a HEADERS frame, followed by CONTINUATION frames if the block is longer than `max_frame`."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return frame(HEADERS, flags | END_HEADERS, stream_id, block)
    parts = [frame(HEADERS, flags, stream_id, block[:max_frame])]
    for start in range(max_frame, len(block), max_frame):
        last = start + max_frame >= len(block)
        part = block[start : start + max_frame]
        parts.append(frame(CONTINUATION, END_HEADERS if last else 0, stream_id, part))
    return b"".join(parts)


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_setting.pack(key, value) for key, value in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the values of a SETTINGS frame's payload; of equal keys, the last counts. Raises Http2Error."""
    if len(payload) % _setting.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a SETTINGS frame has {len(payload)} bytes")
    values = dict(_setting.iter_unpack(payload))
    if values.get(ENABLE_PUSH, 0) > 1:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
    if values.get(INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW:
        raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is larger than 2^31-1")
    if not MIN_MAX_FRAME <= values.get(MAX_FRAME_SIZE, MIN_MAX_FRAME) < 1 << 24:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is not between 2^14 and 2^24-1")
    return values


def reset(stream_id: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, _word.pack(code))


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    """Return a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _word.pack(last_stream_id) + _word.pack(code) + reason.encode())


def window_update(stream_id: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, _word.pack(size))


def read_word(name: str, payload: bytes) -> int:
    """Return the number in the payload of a RST_STREAM or WINDOW_UPDATE frame. Raises Http2Error."""
    if len(payload) != _word.size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, f"a {name} frame has {len(payload)} bytes instead of 4")
    number: int = _word.unpack(payload)[0]
    return number


def without_padding(name: str, flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding. Raises Http2Error."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, f"the padding of a {name} frame is longer than the frame")
    return payload[1 : len(payload) - payload[0]]
