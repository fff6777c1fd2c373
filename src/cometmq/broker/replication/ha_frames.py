"""The protocol of the HA port, without I/O: a slave sends positions, its master sends parts of its log.

A slave sends only its position, as 8-byte integers. The master sends frames: a position (8 bytes), a size (4
bytes), and that many bytes of its log. A frame of size 0 is a heartbeat (docs/reference/storage.md, HA port).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cometmq.errors import ProtocolError

REPORT = struct.Struct(">q")
HEADER = struct.Struct(">qi")


def cut(position: int, data: memoryview, most: int) -> Iterator[bytes | memoryview]:
    """Divide log bytes into frames of at most `most` bytes. Yield the header and the bytes of each."""
    for start in range(0, len(data), most):
        piece = data[start : start + most]
        yield HEADER.pack(position + start, len(piece))
        yield piece


def beat(position: int) -> bytes:
    """Return a heartbeat frame, with the position of the next log byte that the slave will receive."""
    return HEADER.pack(position, 0)


class Reports:
    """Decodes the positions that a slave sends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """Decode received bytes. Return the last complete position in the bytes, or None if there is none."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        return REPORT.unpack_from(data, whole - REPORT.size)[0] if whole else None


class Pieces:
    """Decodes the frames that a master sends.

    Log bytes are passed on as they arrive, without waiting for complete frames. So the decoder stores at most
    a part of a header.
    """

    def __init__(self) -> None:
        self._header = b""
        self._position = 0
        self._left = 0

    def feed(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Decode received bytes.

        Yield log positions, each with the log bytes (a part of `data`) that begin there.

        For a heartbeat, the log bytes are empty.

        Raises:
            ProtocolError: A size or position is negative.
        """
        at = 0
        while at < len(data):
            if not self._left:
                more = HEADER.size - len(self._header)
                self._header += data[at : at + more]
                at += more
                if len(self._header) < HEADER.size:
                    return
                self._position, self._left = HEADER.unpack(self._header)
                self._header = b""
                if self._position < 0 or self._left < 0:
                    raise ProtocolError(
                        f"the master's frame has an invalid position or size: {self._position}, {self._left}"
                    )
                if not self._left:
                    yield self._position, data[:0]
                continue
            piece = data[at : at + self._left]
            yield self._position, piece
            at += len(piece)
            self._position += len(piece)
            self._left -= len(piece)
