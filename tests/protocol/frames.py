"""Concatenated frames."""

from __future__ import annotations

import struct

from cometmq.protocol.frame import Frame, decode_frame


def frames_of(data: bytes) -> list[Frame]:
    """Return the frames of a stream that ends with a complete frame."""
    frames = []
    while data:
        (length,) = struct.unpack_from(">I", data)
        frames.append(decode_frame(data[4 : 4 + length]))
        data = data[4 + length :]
    return frames
