"""Open files of the store, bounded however many queues there are: least recently used first out.

The table belongs to the loop's thread; other threads open paths themselves. Deleted paths must be dropped,
else a new file of that name would be read through the old descriptor.
"""

from __future__ import annotations

import resource
from collections import OrderedDict

from cometmq.store.base.disk import Disk

_MOST = 16_384
_OTHERS = 8_192  # descriptors for connections, where there are many


def fair_share() -> int:
    """As many files as the store may keep open; the rest of what the process may have open is for others."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if allowed == resource.RLIM_INFINITY else min(_MOST, max(allowed // 2, allowed - _OTHERS))


class DescriptorCache:
    """Descriptors by path; at most `limit` are open."""

    __slots__ = ("_disk", "_limit", "_open", "_write")

    def __init__(self, disk: Disk, limit: int | None = None, *, write: bool = True) -> None:
        self._disk = disk
        self._write = write
        self._limit = max(8, fair_share() if limit is None else limit)
        self._open: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, path: str) -> int:
        """Descriptor of an existing file, valid until the next `get`. Raises OSError."""
        table = self._open
        fd = table.get(path)
        if fd is not None:
            table.move_to_end(path)
            return fd
        fd = self._disk.open(path, write=self._write)
        self.put(path, fd)
        return fd

    def put(self, path: str, fd: int) -> None:
        """Take over a descriptor that the caller opened."""
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
