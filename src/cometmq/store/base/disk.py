"""The store's only access to files.

Everything the store does to a disk passes through a `Disk`, so a test can make the n-th write fail, record
every operation for power-loss images, or verify that no other operation happens. Methods take plain
descriptors instead of file objects, because one more call per message would be measurable. Errors are
`OSError` as the system raises them.

With `RWF_NOWAIT` (Linux), a read does not wait for data that is not in the page cache. `pread_cached` then
returns None. It also returns None if the file ends before the requested length. On file systems that do not
support the flag, it is an ordinary read, which waits.

New files have mode 0600 and new directories 0700; existing ones keep their mode. Only regular files are
opened, and never through a link: a user who can write into a store must not be able to redirect a broker or a
tool, or to block it at a pipe. Links further up in a path are followed: a store, or its log, may lie on
another disk by a link (see docs/store.md).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from cometmq.private import keep_mode, make_private_directory

Buffer = bytes | bytearray | memoryview

NO_FILE = "not a file, or a link: below its top level a store follows none (docs/store.md)"
"""The error text for a path at which a store expects a file or directory, but something else exists."""

NOT_A_FILE = (errno.ELOOP, errno.EINVAL, errno.ENXIO)
"""The error numbers with which `Disk.open` fails if something other than a regular file is at the path."""

_RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_FLOCK = struct.Struct("hhqqi4x")  # Linux's struct flock: type, whence, start, length, process
_REFUSED = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
NO_DIRECTORY_LOCKS = (*_REFUSED, errno.EBADF, errno.EISDIR, errno.ENOLCK)
"""The error numbers of `Disk.lock_directory` on a file system that does not support such locks.

EBADF: NFS locks only files that are open for writing.
"""

_held_locks: set[str] = set()  # One set for all instances: they use the same files


class FileFacts(NamedTuple):
    """The length, modification time (epoch ms) and allocated bytes of a file, and whether it is regular."""

    size: int
    modified_ms: int
    allocated: int
    regular: bool = True


class DiskUsage(NamedTuple):
    """The size of one partition, its used bytes, and those that an ordinary user can still use."""

    total: int
    used: int
    usable: int


class Disk:
    """The file access of the store. Paths are strings; offsets and lengths are bytes.

    Attributes:
        lends_descriptors: Whether another process may sync the commit log through descriptors from `open`.
        held_locks: Paths of the lock files that this process has locked. POSIX record locks exclude other
            processes only, so this set excludes a second owner within the process.
    """

    def __init__(self) -> None:
        self.lends_descriptors = True
        self.held_locks = _held_locks
        self._nowait = bool(_RWF_NOWAIT) and hasattr(os, "preadv")

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        """Open a file and return its descriptor. Raises OSError, also for anything but a regular file."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        if create:
            flags |= os.O_CREAT
        if exclusive:
            flags |= os.O_EXCL
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as failure:
            if failure.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "a symbolic link, which no store follows", path) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """Read `length` bytes, fewer only at the end of the file. The call may wait for the disk."""
        data = os.pread(fd, length, offset)
        while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
            data += more
        return data

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        """Return `length` bytes if all of them are in the page cache, else None.

        The result is also None if the file ends earlier, which only `pread` can distinguish.
        """
        if not self._nowait:
            return self.pread(fd, length, offset)
        buffer = bytearray(length)
        try:
            got = os.preadv(fd, (buffer,), offset, _RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as failure:
            if failure.errno not in _REFUSED:
                raise
            self._nowait = False
            return self.pread(fd, length, offset)
        return buffer if got == length else None

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_filesystem(self, path: str) -> bool:
        """Sync the whole file system that holds `path`. Raises OSError. False if there is no such call."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if call is None:
            return False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if call(fd) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error), path)
        finally:
            os.close(fd)
        return True

    def reserve(self, fd: int, length: int) -> None:
        """Reserve `length` bytes of disk space for the file. Bytes that are never written read as zeros."""
        os.posix_fallocate(fd, 0, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def next_data(self, fd: int, offset: int) -> int | None:
        """Return the first position at or after `offset` that may hold data, or None if only holes follow."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as failure:
            if failure.errno == errno.ENXIO:
                return None
            return offset

    def rename(self, source: str, target: str) -> None:
        """Move a file. If it replaces another file, it gets the mode of that file."""
        keep_mode(source, target)
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def makedirs(self, path: str) -> None:
        make_private_directory(path)

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in the directory. A directory that does not exist counts as empty."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def facts(self, path: str) -> FileFacts | None:
        """Return the facts about a file, or None if it does not exist. A link is not followed."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        regular = stat.S_ISREG(status.st_mode)
        return FileFacts(status.st_size, status.st_mtime_ns // 1_000_000, status.st_blocks * 512, regular)

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a directory, or a link to one."""
        return os.path.isdir(path)

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def usage(self, path: str) -> DiskUsage:
        status = os.statvfs(path)
        total, size = status.f_blocks, status.f_frsize
        return DiskUsage(total * size, (total - status.f_bfree) * size, status.f_bavail * size)

    def try_lock(self, fd: int) -> bool:
        """Lock byte 0 exclusively (a POSIX record lock), like Java's `tryLock(0, 1)`, or return False."""
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
        except OSError as failure:
            if failure.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def lock_directory(self, path: str) -> int | None:
        """Lock a directory exclusively until the returned descriptor is closed.

        Returns None if the directory is already locked, by this or another process. Raises OSError, with a
        number of `NO_DIRECTORY_LOCKS` if the file system does not support such locks.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            os.close(fd)
            if failure.errno == errno.EAGAIN:
                return None
            raise
        return fd

    def locked(self, fd: int) -> bool:
        """Return whether another process holds the lock that `try_lock` requests (only known on Linux)."""
        if sys.platform != "linux":
            return False
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def is_numbered(name: str, digits: int) -> bool:
    """Return whether a name consists of `digits` digits. `isdigit` alone accepts more than `int` does."""
    return len(name) == digits and name.isascii() and name.isdigit()


def write_all(disk: Disk, fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data`. After an OSError, a part of it may have been written."""
    written = disk.pwrite(fd, data, offset)
    length = len(data)
    while written < length:
        if written < 0:
            raise OSError(errno.EIO, "write went backwards")
        step = disk.pwrite(fd, memoryview(data)[written:], offset + written)
        if step <= 0:
            raise OSError(errno.EIO, "the write made no progress")
        written += step


_ZEROS = bytes(1 << 16)


def is_zero(data: bytes) -> bool:
    """Return whether every byte is zero, as fast as memory can be read."""
    length = len(data)
    return data == (_ZEROS[:length] if length <= len(_ZEROS) else bytes(length))


def zero_out(disk: Disk, fd: int, start: int, stop: int) -> bool:
    """Overwrite [start, stop) of a file with zeros. Raises OSError.

    The file is not truncated instead: if a power failure left it short, it would look like a file of another
    size. Returns whether the range held anything other than zeros, or could not be read in part.
    """
    changed = False
    length = 1 << 12  # Short at first, because usually a hole begins after a few bytes
    at: int | None = start
    while at is not None and at < stop:
        length = min(length, stop - at)
        try:
            zero = is_zero(disk.pread(fd, length, at))
        except OSError:
            zero = False
        if not zero:
            write_all(disk, fd, bytes(length), at)
            changed = True
        at = disk.next_data(fd, at + length)
        length = 1 << 16
    return changed


def make_directory(disk: Disk, path: str) -> None:
    """Create a directory and its missing parents, and sync each new name. Raises OSError."""
    if not disk.is_dir(path):
        above = os.path.dirname(path) or "."
        make_directory(disk, above)
        disk.makedirs(path)
        disk.fsync_dir(above)


def unlink_any(disk: Disk, path: str) -> None:
    """Delete a file if it exists. Raises OSError if the deletion fails."""
    with suppress(FileNotFoundError):
        disk.unlink(path)


@contextmanager
def opened(disk: Disk, path: str, *, create: bool = False, write: bool = True) -> Iterator[int]:
    """Open a file for the duration of a `with` block. Raises OSError."""
    fd = disk.open(path, create=create, write=write)
    try:
        yield fd
    finally:
        disk.close(fd)


def read_file(disk: Disk, path: str, limit: int = 64 << 20) -> bytes:
    """Return the whole content of a small file. Raises FileNotFoundError and other OSErrors."""
    with opened(disk, path, write=False) as fd:
        return disk.pread(fd, limit, 0)


def write_new_file(disk: Disk, path: str, data: bytes) -> None:
    """Create or overwrite a small file with exactly `data`, and sync it."""
    with opened(disk, path, create=True) as fd:
        disk.truncate(fd, 0)
        write_all(disk, fd, data, 0)
        disk.fdatasync(fd)


def replace_file(disk: Disk, path: str, data: bytes) -> None:
    """Replace a small file atomically, even if the power fails, and sync it. An OSError changes nothing."""
    write_new_file(disk, path + ".tmp", data)
    disk.rename(path + ".tmp", path)
    disk.fsync_dir(os.path.dirname(path))
