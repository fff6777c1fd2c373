"""Read-only access to the files of a store, for tools that do not open the store.

A broker may be using the store meanwhile, so a file can disappear between two reads. A file that has
disappeared counts as empty, and so does anything that is not a regular file: a link, a pipe, a device.
"""

from __future__ import annotations

from typing import Self

from cometmq.store.base.descriptors import DescriptorCache
from cometmq.store.base.disk import NOT_A_FILE, Disk, is_zero

_OPEN_FILES = 128
_BLOCK = 1 << 16


class ReadOnlyFiles:
    """Reads files and keeps a few dozen descriptors open. A context manager, which closes them at the end."""

    __slots__ = ("_descriptors", "disk")

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._descriptors = DescriptorCache(disk, _OPEN_FILES, write=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.close()

    def read(self, path: str, length: int, offset: int) -> bytes:
        """Read up to `length` bytes: fewer at the end of the file, none if the file does not exist.

        Raises OSError for other failures.
        """
        fd = self._descriptor(path)
        return b"" if fd is None else self.disk.pread(fd, length, offset)

    def next_data(self, path: str, offset: int) -> int | None:
        """Return the start of the first data at or after `offset`, or None if only a hole follows."""
        fd = self._descriptor(path)
        return None if fd is None else self.disk.next_data(fd, offset)

    def _descriptor(self, path: str) -> int | None:
        try:
            return self._descriptors.get(path)
        except FileNotFoundError:
            return None
        except OSError as failure:
            if failure.errno in NOT_A_FILE:
                return None
            raise


def first_byte(files: ReadOnlyFiles, path: str, start: int, stop: int) -> int | None:
    """Return the position of the first nonzero byte in [start, stop) of a file, or None.

    Holes are skipped without reading them.
    """
    at: int | None = start
    while at is not None and at < stop:
        data = files.read(path, min(_BLOCK, stop - at), at)
        if not data:
            return None
        if not is_zero(data):
            return at + len(data) - len(data.lstrip(b"\0"))
        at = files.next_data(path, at + len(data))
    return None
