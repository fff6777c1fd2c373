"""Read access to the units of consume queues for tools, even while a broker uses the queues."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cometmq.store.base.config import CONSUME_QUEUE_UNIT as UNIT
from cometmq.store.base.disk import is_numbered, is_zero
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import UNIT_DTYPE, file_name
from cometmq.store.recovery.store_layout import QueueFiles

_CHUNK_UNITS = 4096  # Number of consume-queue units that are read at a time
_BLOCK = 1 << 16
_PAGE = 4096
_MAX_HOLE_UNITS = 1_000_000  # If more units than this are missing before a file, the file's name is damaged


class UnitFiles:
    """Reads the units of one consume queue from its files.

    Offsets range from `first` to before `end`, as they were when this object was created.
    """

    __slots__ = ("_bases", "_files", "_size", "end", "first", "path")

    def __init__(self, files: ReadOnlyFiles, queue: QueueFiles, file_size: int) -> None:
        self._files = files
        self._size = file_size
        self.path = queue.path
        self._bases = [file.base for file in queue.files]
        self.first = self._bases[0] // UNIT if self._bases else 0
        self.end = self.first
        for base in reversed(self._bases):
            used = self._used(base)
            if used:
                self.end = (base + used + UNIT - 1) // UNIT
                break

    def _used(self, base: int) -> int:
        """Return the length of a file up to its last nonzero byte."""
        path, used = f"{self.path}/{file_name(base)}", 0
        at = self._files.next_data(path, 0)
        while at is not None and at < self._size:
            data = self._files.read(path, min(_BLOCK, self._size - at), at)
            if not data:
                break
            left = _used_length(data)
            used = at + left if left else used
            at = self._files.next_data(path, at + len(data))
        return used

    def first_now(self) -> int:
        """Return the offset at which the queue's files begin now. Retention may have deleted some."""
        names = [name for name in self._files.disk.listdir(self.path) if is_numbered(name, 20)]
        return int(names[0]) // UNIT if names else self.end

    def location(self, offset: int) -> tuple[str, int]:
        """Return the path of the file that holds a unit, and the position of the unit in the file."""
        position = offset * UNIT
        base = position - position % self._size
        return f"{self.path}/{file_name(base)}", position - base

    def read(self, start: int, stop: int) -> bytes:
        """Return the units of the queue offsets from `start` to before `stop`. Missing units are zeros."""
        parts = []
        while start < stop:
            path, at = self.location(start)
            count = min(stop - start, (self._size - at) // UNIT)
            parts.append(self._files.read(path, count * UNIT, at).ljust(count * UNIT, b"\0"))
            start += count
        return b"".join(parts)

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Yield the units from `start` to before `stop`: the offset of the first, and consecutive units."""
        while start < stop:
            start = self._after_hole(start)
            count = min(_CHUNK_UNITS, stop - start)
            if count <= 0:
                return
            yield start, np.frombuffer(self.read(start, start + count), UNIT_DTYPE)
            start += count

    def _after_hole(self, offset: int) -> int:
        """Return `offset`, or the end of the hole there if only a damaged file name can explain the hole."""
        base = offset * UNIT - offset * UNIT % self._size
        following = bisect_left(self._bases, base)
        behind = self._bases[following] // UNIT if following < len(self._bases) else offset
        return behind if behind - offset > _MAX_HOLE_UNITS else offset


def _used_length(data: bytes) -> int:
    """Return the length of `data` without the zeros at its end, which are skipped fast, by pages."""
    stop = len(data)
    while stop and is_zero(data[max(0, stop - _PAGE) : stop]):
        stop = max(0, stop - _PAGE)
    return len(data[:stop].rstrip(b"\0"))
