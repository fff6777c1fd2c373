"""The protocol of the HA port: positions to the master, pieces of its log to the slave. No I/O.

A slave sends its position as i8, nothing else. The master sends a position as i8, a size as i4, and that many
bytes of its log; size 0 is a heartbeat (docs/reference/storage.md, HA port).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cometmq.errors import ProtocolError

REPORT = struct.Struct(">q")
HEADER = struct.Struct(">qi")


def cut(position: int, data: memoryview, most: int) -> Iterator[bytes | memoryview]:
    """Yield the log bytes from `position` on in frames of at most `most` log bytes, header by header."""
    for start in range(0, len(data), most):
        piece = data[start : start + most]
        yield HEADER.pack(position + start, len(piece))
        yield piece


def beat(position: int) -> bytes:
    """Return a heartbeat with the next position that the slave will receive."""
    return HEADER.pack(position, 0)


class Reports:
    """The decoder of a slave's positions."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """Return the last complete position; None without one."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        return REPORT.unpack_from(data, whole - REPORT.size)[0] if whole else None


class Pieces:
    """The decoder of the master's log bytes, as they arrive: a frame need not be complete.

    So at most part of a header is kept.
    """

    def __init__(self) -> None:
        self._header = b""
        self._position = 0
        self._left = 0

    def feed(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield (position, bytes of the log), a part of `data`; empty bytes for a heartbeat.

        Raises ProtocolError for an invalid size or position.
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
                        f"the master's frame has position {self._position} and size {self._left}"
                    )
                if not self._left:
                    yield self._position, data[:0]
                continue
            piece = data[at : at + self._left]
            yield self._position, piece
            at += len(piece)
            self._position += len(piece)
            self._left -= len(piece)
