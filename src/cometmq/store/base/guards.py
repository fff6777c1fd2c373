"""`lock` keeps a second broker out of a store, `abort` tells the next start how the last one ended.

`lock`: an exclusive lock over byte 0, the kind that Apache's broker takes, then the text `lock`. Apache
takes it after recovery has already rewritten files; we take it first. `abort`: exists from the end of the
start to the end of a clean stop; empty in 4.9, a process id in 5.x, so only its existence counts.
"""

from __future__ import annotations

import os

from cometmq.errors import StoreError
from cometmq.store.base.disk import Disk, opened, write_all

_held: set[str] = set()  # POSIX record locks do not exclude a second owner in the same process


def _lock_path(root: str) -> str:
    """One path for all paths of a store. Not where a link in place of the file leads: it is written to."""
    return os.path.join(os.path.realpath(root), "lock")


class StoreLock:
    """Holds the store directory until `release`."""

    __slots__ = ("_disk", "_fd", "_path")

    def __init__(self, disk: Disk, root: str) -> None:
        """Raises StoreError when another process, or another store of this one, holds the directory."""
        self._disk = disk
        self._path = _lock_path(root)
        if self._path in _held:
            raise StoreError(f"Lock failed,MQ already started: {self._path}")
        fd = disk.open(self._path, create=True)
        if not disk.try_lock(fd):
            disk.close(fd)
            raise StoreError(f"Lock failed,MQ already started: {self._path}")
        self._fd: int | None = fd
        _held.add(self._path)
        try:
            write_all(disk, fd, b"lock", 0)
            disk.fdatasync(fd)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None
            _held.discard(self._path)


def lock_held(disk: Disk, root: str) -> bool:
    """Whether somebody holds the store in `root`. Takes nothing and writes nothing."""
    path = _lock_path(root)
    if path in _held:
        return True  # asked before the file is opened: closing it would give our own lock away
    try:
        with opened(disk, path, write=False) as fd:
            return disk.locked(fd)
    except FileNotFoundError:
        return False


class AbortFile:
    """The `abort` file."""

    __slots__ = ("_disk", "_path")

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path

    def exists(self) -> bool:
        return self._disk.facts(self._path) is not None

    def set(self) -> None:
        self._disk.close(self._disk.open(self._path, create=True))
        self._disk.fsync_dir(os.path.dirname(self._path) or ".")

    def clear(self) -> None:
        try:
            self._disk.unlink(self._path)
        except FileNotFoundError:
            return
        self._disk.fsync_dir(os.path.dirname(self._path) or ".")
