"""The files `lock`, which excludes a second broker from a store, and `abort`, which records an unclean stop.

`lock`: an exclusive lock over byte 0, as Apache's broker acquires it, then the text `lock`. Apache's broker
acquires it after recovery has already rewritten files; CometMQ acquires it first. `abort`: exists from the
end of the start to the end of a clean stop. It is empty in 4.9 and holds a process id in 5.x, so only its
existence counts. The directories of log, consume queues and index have locks of their own, because settings
can name directories of another store.
"""

from __future__ import annotations

import os

from cometmq.errors import StoreError
from cometmq.store.base.config import CONSUME_QUEUES, INDEX, StoreConfig
from cometmq.store.base.disk import Disk, opened, write_all

_held: set[str] = set()  # POSIX record locks do not exclude a second owner in the same process


def _lock_path(root: str) -> str:
    """Return the path of the lock file, the same one for all paths of a store.

    If the lock file itself is a symbolic link, the link is not followed, because the file is written.
    """
    return os.path.join(os.path.realpath(root), "lock")


class StoreLock:
    """The lock of a store and of its directories, held until `release`."""

    __slots__ = ("_directories", "_disk", "_fd", "_path")

    def __init__(self, disk: Disk, config: StoreConfig) -> None:
        """Lock the store directory, and those of log, consume queues and index that exist.

        Raises StoreError if another process, or another store of this process, holds one of them.
        """
        self._disk = disk
        self._path = _lock_path(config.root)
        self._directories: list[int] = []
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
            for path in (*config.commit_log_dirs, config.location(CONSUME_QUEUES), config.location(INDEX)):
                if disk.is_dir(path):
                    self._lock_directory(path)
        except (OSError, StoreError):
            self.release()
            raise

    def _lock_directory(self, path: str) -> None:
        fd = self._disk.lock_directory(path)
        if fd is None:
            raise StoreError("another store is using this directory", path)
        self._directories.append(fd)

    def release(self) -> None:
        if self._fd is not None:
            for fd in (*self._directories, self._fd):
                self._disk.close(fd)
            self._fd = None
            _held.discard(self._path)


def lock_held(disk: Disk, root: str) -> bool:
    """Return whether a process holds the store in `root`. Locks nothing and writes nothing."""
    path = _lock_path(root)
    if path in _held:
        return True  # checked before the file is opened: closing the file would release our own lock
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
