"""A disk in memory that records every change, for the crash images of `crash_images`.

A power failure may leave the following states. They are stricter than those of the usual journalling file
systems, so that a store that passes does not depend on one of them:

- **Data.** Each 512-byte sector holds any one of the contents that it has had since the last `fdatasync` of
  its file, independently of the others: writes may be dropped, torn between sectors, and arrive in any
  order. A write is atomic within a sector. Bytes written before the `fdatasync` are durable.
- **Lengths.** A file has any one of the lengths that it has had since the last `fdatasync` (`truncate`,
  `reserve`, writes beyond the end). Bytes beyond the length are lost; a longer length is filled with zeros.
  A shrink also changes each sector that it cuts off (to zeros).
- **Names.** Creations, renames, deletions and new directories are durable once their directory has been
  synced (`fsync_dir`); until then each of them may be lost. A rename is one change. A new file's
  `fdatasync` saves its content but not its name. The entries of a directory whose own name is lost are lost.
- **Not modelled**: a device that reports a flush that did not happen, damage to sectors that were not
  written (the tests of bit rot cover it), and sectors torn inside.

A crash of the process alone loses nothing: continue with the same `RecordingDisk`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from cometmq.store import Buffer, Disk, DiskUsage, FileFacts

Image = dict[str, bytes | None]
"""Content of files by path; None stands for a directory."""


class Operation(NamedTuple):
    """One change or one sync.

    Attributes:
        names: Inodes of the paths after the operation; None if the path no longer exists.
    """

    kind: str
    path: str
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    names: tuple[tuple[str, int | None], ...] = ()

    def __str__(self) -> str:
        detail = f" {len(self.data)} bytes at {self.offset}" if self.kind == "pwrite" else ""
        return f"{self.kind} {self.path}{detail or (f' to {self.offset}' if self.kind == 'length' else '')}"


class RecordingDisk(Disk):
    """A thread-safe `Disk` in memory; `history` holds all operations since the image `start`."""

    lends_descriptors = False

    def __init__(self, start: Image | None = None, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.start: Image = {"/": None, **(start or {})}
        self.history: list[Operation] = []
        self.now_ms = now_ms
        self.held_locks: set[str] = set()
        self.files: dict[int, bytearray | None] = {}  # content by inode; None for a directory
        self.names: dict[str, int] = {}
        for path, content in self.start.items():
            self.names[path] = self._new_inode(None if content is None else bytearray(content))
        self.start_names = dict(self.names)
        self._modified: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._paths: dict[int, str] = {}
        self._next_fd = 1000
        self._lock = threading.RLock()

    def image(self) -> Image:
        """Return the disk as running programs see it, with all changes."""
        return {path: self._content(inode) for path, inode in self.names.items()}

    def _content(self, inode: int) -> bytes | None:
        data = self.files[inode]
        return None if data is None else bytes(data)

    def _new_inode(self, content: bytearray | None) -> int:
        inode = len(self.files)
        self.files[inode] = content
        return inode

    def _data(self, fd: int) -> bytearray:
        data = self.files[self._open[fd]]
        assert data is not None
        return data

    def _record(self, operation: Operation) -> None:
        apply_names(self.names, operation)
        if operation.kind in ("pwrite", "length"):
            self._modified[operation.inode] = self.now_ms()
        self.history.append(operation)

    # -- files ------------------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        with self._lock:
            inode = self.names.get(path)
            if inode is None:
                if not create or self.names.get(os.path.dirname(path)) is None:
                    raise failure(errno.ENOENT, path)
                inode = self._new_inode(bytearray())
                self._record(Operation("create", path, inode, names=((path, inode),)))
            elif exclusive:
                raise failure(errno.EEXIST, path)
            fd = self._next_fd
            self._next_fd += 1
            self._open[fd] = inode
            self._paths[fd] = path
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            del self._open[fd], self._paths[fd]

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return bytes(self._data(fd)[offset : offset + length])

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        return self._data(fd)[offset : offset + length]

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        with self._lock:
            content, copy = self._data(fd), bytes(data)
            apply_write(content, offset, copy)
            self._record(Operation("pwrite", self._paths[fd], self._open[fd], offset, copy))
            return len(copy)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._record(Operation("fdatasync", self._paths[fd], self._open[fd]))

    def reserve(self, fd: int, length: int) -> None:
        if len(self._data(fd)) < length:
            self.truncate(fd, length)

    def truncate(self, fd: int, length: int) -> None:
        with self._lock:
            content = self._data(fd)
            if len(content) != length:
                apply_length(content, length)
                self._record(Operation("length", self._paths[fd], self._open[fd], length))

    def next_data(self, fd: int, offset: int) -> int | None:
        content = self._data(fd)
        rest = content[offset:].lstrip(b"\0")
        return len(content) - len(rest) if rest else None

    # -- names ------------------------------------------------------------------------------------

    def fsync_dir(self, path: str) -> None:
        with self._lock:
            self._inode(path)
            self._record(Operation("fsync_dir", path))

    def sync_filesystem(self, path: str) -> bool:
        return False

    def _inode(self, path: str) -> int:
        inode = self.names.get(path)
        if inode is None:
            raise failure(errno.ENOENT, path)
        return inode

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory with all its entries. Counts as a change of `source`'s directory."""
        with self._lock:
            inode = self._inode(source)
            moved = [path for path in self.names if path == source or path.startswith(source + "/")]
            names: list[tuple[str, int | None]] = [(path, None) for path in moved]
            names += [(target + path[len(source) :], self.names[path]) for path in moved]
            self._record(Operation("rename", source, inode, names=tuple(names)))

    def unlink(self, path: str) -> None:
        with self._lock:
            self._record(Operation("unlink", path, self._inode(path), names=((path, None),)))

    def rmdir(self, path: str) -> None:
        with self._lock:
            inode = self._inode(path)
            if self.listdir(path):
                raise failure(errno.ENOTEMPTY, path)
            self._record(Operation("rmdir", path, inode, names=((path, None),)))

    def makedirs(self, path: str) -> None:
        with self._lock:
            if path not in self.names:
                self.makedirs(os.path.dirname(path))
                inode = self._new_inode(None)
                self._record(Operation("mkdir", path, inode, names=((path, inode),)))

    def listdir(self, path: str) -> list[str]:
        top = path.rstrip("/") or "/"
        inside = (each for each in self.names if os.path.dirname(each) == top and each != "/")
        return sorted(map(os.path.basename, inside))

    def facts(self, path: str) -> FileFacts | None:
        inode = self.names.get(path)
        if inode is None:
            return None
        size = len(self.files[inode] or b"")
        return FileFacts(size, self._modified.get(inode, 0), size, self.files[inode] is not None)

    def is_dir(self, path: str) -> bool:
        inode = self.names.get(path)
        return inode is not None and self.files[inode] is None

    def is_link(self, path: str) -> bool:
        return False

    def usage(self, path: str) -> DiskUsage:
        return DiskUsage(100, 10, 90)

    def try_lock(self, fd: int) -> bool:
        return True

    def lock_directory(self, path: str) -> int | None:
        return self.open(path)

    def locked(self, fd: int) -> bool:
        return False


def failure(code: int, path: str) -> OSError:
    """Return the OSError of a refused operation, in the subclass that belongs to the code."""
    return OSError(code, os.strerror(code), path)


def apply_names(names: dict[str, int], operation: Operation) -> None:
    """Apply an operation to the names of a disk."""
    for path, inode in operation.names:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode


def apply_write(content: bytearray, offset: int, data: bytes) -> None:
    """Apply a write to the content of a file."""
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def apply_length(content: bytearray, length: int) -> None:
    """Apply a change of length to the content of a file."""
    del content[length:]
    content.extend(bytes(length - len(content)))
