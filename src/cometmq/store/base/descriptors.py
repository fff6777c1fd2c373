"""A cache of the store's open files. Above a limit, the least recently used file is closed.

Only the loop's thread may use the cache; other threads open paths themselves. When a path is deleted, its
descriptor must be dropped: otherwise a new file of that name would be read through the old descriptor.
"""

from __future__ import annotations

import resource
from collections import OrderedDict

from cometmq.store.base.disk import Disk

_MAX_DESCRIPTORS = 16_384
_RESERVED_DESCRIPTORS = 8_192  # descriptors left for connections if the limit of the process is high


def fair_share() -> int:
    """Return how many files the store may keep open: a part of the process's limit on open files."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_DESCRIPTORS
        if allowed == resource.RLIM_INFINITY
        else min(_MAX_DESCRIPTORS, max(allowed // 2, allowed - _RESERVED_DESCRIPTORS))
    )


class DescriptorCache:
    """A cache of open file descriptors by path. At most `limit` are open at a time."""

    __slots__ = ("_disk", "_limit", "_open", "_write")

    def __init__(self, disk: Disk, limit: int | None = None, *, write: bool = True) -> None:
        self._disk = disk
        self._write = write
        self._limit = max(8, fair_share() if limit is None else limit)
        self._open: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: str) -> int:
        """Return the descriptor of an existing file. Raises OSError.

        The cache may close the descriptor in the next call of `get` or `put`.
        """
        table = self._open
        fd = table.get(path)
        if fd is not None:
            table.move_to_end(path)
            return fd
        fd = self._disk.open(path, write=self._write)
        self.put(path, fd)
        return fd

    def put(self, path: str, fd: int) -> None:
        """Add a descriptor that the caller opened. The cache owns it from then on."""
        self.drop(path)
        self._open[path] = fd
        if len(self._open) > self._limit:
            _, oldest = self._open.popitem(last=False)
            self._disk.close(oldest)

    def drop(self, path: str) -> None:
        fd = self._open.pop(path, None)
        if fd is not None:
            self._disk.close(fd)

    def close(self) -> None:
        while self._open:
            _, fd = self._open.popitem()
            self._disk.close(fd)
