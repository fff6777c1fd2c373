"""Reading a store from outside: descriptors that cannot write, records and queue units by position.

For the operator's tools, which look at directories that a broker may be using. A file that goes away between
two looks reads as empty, and so does what is none: a link, a pipe, a device.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Self

from cometmq.store.config import StoreConfig
from cometmq.store.disk import NOT_A_FILE, Disk, is_zero
from cometmq.store.log_places import LogPlaces
from cometmq.store.scan import Facts, record_facts

_OPEN_FILES = 128
_BLOCK = 1 << 16


class ReadOnlyFiles:
    """A few dozen descriptors, opened for reading only. A context manager."""

    __slots__ = ("_open", "disk")

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._open: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self.disk.close(self._open.popitem()[1])

    def read(self, path: str, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer at the end of the file, none when it is gone. Raises other OSErrors."""
        fd = self._descriptor(path)
        return b"" if fd is None else self.disk.pread(fd, length, offset)

    def next_data(self, path: str, offset: int) -> int | None:
        """Where the next bytes lie that are no hole, from `offset` on; None if there are none."""
        fd = self._descriptor(path)
        return None if fd is None else self.disk.next_data(fd, offset)

    def _descriptor(self, path: str) -> int | None:
        fd = self._open.get(path)
        if fd is None:
            try:
                fd = self.disk.open(path, write=False)
            except FileNotFoundError:
                return None
            except OSError as failure:
                if failure.errno in NOT_A_FILE:
                    return None
                raise
            if len(self._open) >= _OPEN_FILES:
                self.disk.close(self._open.popitem(last=False)[1])
            self._open[path] = fd
        else:
            self._open.move_to_end(path)
        return fd


def first_byte(files: ReadOnlyFiles, path: str, start: int, stop: int) -> int | None:
    """Where in [start, stop) of a file the first byte is that is not zero; holes are passed over."""
    at: int | None = start
    while at is not None and at < stop:
        data = files.read(path, min(_BLOCK, stop - at), at)
        if not data:
            return None
        if not is_zero(data):
            return at + len(data) - len(data.lstrip(b"\0"))
        at = files.next_data(path, at + len(data))
    return None


class LogReader:
    """Single records of a commit log by their position."""

    __slots__ = ("_files", "_places", "_segment_size")

    def __init__(self, files: ReadOnlyFiles, config: StoreConfig) -> None:
        self._files = files
        self._places = LogPlaces(files.disk, config)
        self._segment_size = config.mapped_file_size_commit_log

    def path_of(self, position: int) -> str:
        """Path of the segment that holds a position, whether it exists or not."""
        return self._places.path_of(position - position % self._segment_size)

    def record(self, position: int) -> bytes:
        """The bytes of the valid record at `position`; none if no valid record begins there."""
        found = self._read(position)
        return found[1] if found is not None else b""

    def facts(self, position: int) -> Facts | None:
        """What dispatch needs to know of the valid record at `position`; None if none begins there."""
        found = self._read(position)
        return found[0] if found is not None else None

    def _read(self, position: int) -> tuple[Facts, bytes] | None:
        if not 0 <= position < 1 << 62:
            return None
        path, at = self.path_of(position), position % self._segment_size
        try:
            head = self._files.read(path, 4, at)
            size = int.from_bytes(head, "big", signed=True)
            if len(head) < 4 or not 0 < size <= self._segment_size - at:
                return None
            data = self._files.read(path, size, at)
        except OSError as failure:
            if failure.errno == errno.EIO:  # a sector that the device cannot read
                return None
            raise
        facts = record_facts(memoryview(data), 0, position)
        return None if facts is None else (facts, data)
