"""What goes over the HA port: positions to the master, pieces of its log to the slave. No I/O in here.

A slave sends i8 its position, nothing else.
The master sends i8 position, i4 size, and so many bytes of its log; size 0 is a heart-beat
(docs/reference/storage.md, HA port).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from cometmq.errors import ProtocolError

REPORT = struct.Struct(">q")
HEADER = struct.Struct(">qi")


def cut(position: int, data: memoryview, most: int) -> Iterator[bytes | memoryview]:
    """Bytes of the log from `position` on as frames of at most `most` bytes of log each: header, bytes,
    header, bytes ..."""
    for start in range(0, len(data), most):
        piece = data[start : start + most]
        yield HEADER.pack(position + start, len(piece))
        yield piece


def beat(position: int) -> bytes:
    """A heart-beat: the next position that the slave will be sent."""
    return HEADER.pack(position, 0)


class Reports:
    """Takes a slave's positions out of the bytes of its connection."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> int | None:
        """The last whole position that has come; None without one."""
        data = self._rest + data
        whole = len(data) - len(data) % REPORT.size
        self._rest = data[whole:]
        return REPORT.unpack_from(data, whole - REPORT.size)[0] if whole else None


class Pieces:
    """Takes the master's bytes out of those of its connection, as they come: a frame's need not be there yet.

    So nothing is kept but part of a header.
    """

    def __init__(self) -> None:
        self._header = b""
        self._position = 0
        self._left = 0

    def feed(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """(position, bytes of the log); no bytes: a heart-beat. Raises ProtocolError for a size or position
        that is none. The bytes are part of `data`."""
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
