"""The files `lock`, which excludes a second broker from a store, and `abort`, which records an unclean stop.

`lock` has an exclusive lock on byte 0, as in Apache's broker, and contains the text `lock`. Apache's broker
locks it only after recovery has already rewritten files; CometMQ locks it first. `abort` exists from the end
of the start to the end of a clean stop. It is empty in 4.9 and holds a process id in 5.x, so only its
existence counts.

The directories of log, consume queues and index have locks of their own. If `abort` or `checkpoint` is
outside the store directory, a file `<file>.owner` beside it holds the path of that directory. A lock would
not be enough: the other store may not be running (docs/store.md, Directories elsewhere).
"""

from __future__ import annotations

import os
import threading

from cometmq import logs
from cometmq.errors import ConfigError, StoreError, StoreInUse
from cometmq.store.base.config import ABORT, CHECKPOINT, CONSUME_QUEUES, INDEX, StoreConfig
from cometmq.store.base.disk import NO_DIRECTORY_LOCKS, Disk, opened, read_file, write_all

log = logs.logger(__name__)
_MAX_PATH_BYTES = 4096
_LOCK_TEXT = b"lock"
# Held while a lock file is locked, because record locks do not exclude other threads of this process.
_claiming = threading.Lock()


def _lock_path(root: str) -> str:
    """Return the path of the lock file, which is the same for every path that leads to the store."""
    return os.path.join(os.path.realpath(root), "lock")


class StoreLock:
    """The lock of a store and of its directories, held until `release`."""

    def __init__(self, disk: Disk, config: StoreConfig) -> None:
        """Lock the store directory, and the directories of log, consume queues and index that exist.

        Raises StoreInUse if another process, or another store of this process, holds one of the locks,
        StoreError if one cannot be locked, ConfigError if `abort` or `checkpoint` belongs to another store,
        and OSError.
        """
        self._disk = disk
        self._path = _lock_path(config.root)
        self._directories: list[int] = []
        if self._path in disk.held_locks:
            raise StoreInUse(f"Lock failed,MQ already started: {self._path}")
        fd = disk.open(self._path, create=True)
        try:
            if not disk.try_lock(fd):
                raise StoreInUse(f"Lock failed,MQ already started: {self._path}")
        except OSError as failure:
            disk.close(fd)
            raise StoreError(f"the file system cannot lock files: {failure.strerror}", self._path) from None
        except StoreError:
            disk.close(fd)
            raise
        self._fd: int | None = fd
        disk.held_locks.add(self._path)
        try:
            write_all(disk, fd, _LOCK_TEXT, 0)
            disk.fdatasync(fd)
            for path in (*config.commit_log_dirs, config.location(CONSUME_QUEUES), config.location(INDEX)):
                if disk.is_dir(path):
                    self._lock_directory(path)
            for key in (CHECKPOINT, ABORT):
                _claim(disk, config, key)
        except BaseException:
            self.release()
            raise

    def _lock_directory(self, path: str) -> None:
        try:
            fd = self._disk.lock_directory(path)
        except OSError as failure:
            if failure.errno not in NO_DIRECTORY_LOCKS:
                raise StoreError(f"the directory cannot be locked: {failure.strerror}", path) from None
            log.warning(
                "%s: the file system cannot lock directories (%s), so a second store in it is not noticed",
                path, failure.strerror,
            )  # fmt: skip
            return
        if fd is None:
            raise StoreInUse("another store is using this directory", path)
        self._directories.append(fd)

    def release(self) -> None:
        if self._fd is not None:
            for fd in (*self._directories, self._fd):
                self._disk.close(fd)
            self._fd = None
            self._disk.held_locks.discard(self._path)


def lock_held(disk: Disk, root: str) -> bool:
    """Return whether a process holds the store in `root`. Locks nothing and writes nothing."""
    path = _lock_path(root)
    if path in disk.held_locks:
        return True  # `opened` would close the file at the end and thereby release this process's own lock
    try:
        with opened(disk, path, write=False) as fd:
            return disk.locked(fd)
    except FileNotFoundError:
        return False


def is_store(disk: Disk, root: str) -> bool:
    """Return whether a directory contains the lock file of a store, running or not, readable or not."""
    try:
        path = _lock_path(root)
        if path in disk.held_locks:
            # `read_file` would close the file at the end and thereby release this process's own lock.
            return True
        return read_file(disk, path, len(_LOCK_TEXT) + 1) == _LOCK_TEXT
    except PermissionError:
        return True
    except (OSError, ValueError):  # Opening a path that contains NUL raises ValueError
        return False


def _claim(disk: Disk, config: StoreConfig, key: str) -> None:
    """Check that a file belongs to no other store. Raises ConfigError, StoreError, OSError.

    If the file lies outside the store directory, this store is recorded as the owner. Another recorded owner
    does not count if that store has moved or no longer exists.
    """
    root, path = os.path.realpath(config.root), config.location(key)
    record = f"{path}.owner"
    with _claiming:
        try:
            owner = _checked_owner(disk, key, path, read_file(disk, record, _MAX_PATH_BYTES), root)
        except FileNotFoundError:
            owner = ""
        outside = not os.path.realpath(path).startswith(root.rstrip("/") + "/")
        if owner != root and outside and disk.is_dir(config.parent_of(key)):
            with opened(disk, record, create=True) as fd:
                _record_owner(disk, fd, key, path, root)
            disk.fsync_dir(config.parent_of(key))


def _record_owner(disk: Disk, fd: int, key: str, path: str, root: str) -> None:
    """Record a store as the owner in an open owner file, unless another store has done so meanwhile.

    The file is locked while it is read again and written. It is written in place, because a renamed file
    would not have the lock.
    """
    try:
        locked = disk.try_lock(fd)
    except OSError as failure:
        raise StoreError(f"the file system cannot lock files: {failure.strerror}", f"{path}.owner") from None
    if not locked:
        raise StoreInUse("another store that starts is recording itself as the owner of this file", path)
    _checked_owner(disk, key, path, disk.pread(fd, _MAX_PATH_BYTES, 0), root)
    disk.truncate(fd, 0)
    write_all(disk, fd, root.encode(errors="surrogateescape"), 0)
    disk.fdatasync(fd)


def _checked_owner(disk: Disk, key: str, path: str, content: bytes, root: str) -> str:
    """Return the owner of the file `path` in `content`, that of its owner file; "" if none is recorded.

    Raises ConfigError if the owner is another store that still exists.
    """
    owner = content.decode(errors="surrogateescape")
    if owner and owner != root and is_store(disk, owner):
        cure = f"remove {path}.owner if that store no longer uses it"
        raise ConfigError(key, path, f"a file of this store alone; this one belongs to {owner} ({cure})")
    return owner


class AbortFile:
    """The file `abort`, which exists while a store is open and after an unclean stop."""

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
