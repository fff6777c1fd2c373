"""A disk in memory that knows what a power failure may leave of it.

Every change is kept as pending until it is forced out: data by `fdatasync` of its file, names by
`fsync_dir` of their directory. `crash_images` builds states that a failure at this moment may leave, by
rules that are stricter than most file systems: of the pending writes to a file any may be there, in any
order, each in units of 512-byte sectors; pending changes of length arrive in order; pending changes of
names (new files and directories, renames, deletions) arrive in order, but independently of the data, and
`fdatasync` of a new file does not save its name.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cometmq.store.disk import Buffer, DiskUsage, FileFacts

SECTOR = 512
Image = dict[str, bytes | None]
"""Path -> content, None for a directory."""


class Change(NamedTuple):
    """A pending change of a file: data at an offset, or (data None) a new length."""

    offset: int
    data: bytes | None


class Inode:
    """A file, as running programs see it, as the device has it, and what lies between."""

    __slots__ = ("data", "durable", "is_dir", "pending")

    def __init__(self, is_dir: bool = False) -> None:
        self.is_dir = is_dir
        self.data = bytearray()
        self.durable = b""
        self.pending: list[Change] = []


class NameChange(NamedTuple):
    """A pending change of names: `path` now means `inode`, or nothing."""

    path: str
    inode: Inode | None


class CrashDisk:
    """A `Disk` in memory; `after` is called after every operation that changes something."""

    def __init__(self, image: Image | None = None) -> None:
        self.names: dict[str, Inode] = {"/": Inode(is_dir=True)}
        for path, content in sorted((image or {}).items()):
            inode = Inode(is_dir=content is None)
            if content is not None:
                inode.data = bytearray(content)
                inode.durable = content
            self.names[path] = inode
        self.durable_names = dict(self.names)
        self.pending_names: list[NameChange] = []
        self.after: Callable[[str, str], None] = lambda _operation, _path: None
        self._open: dict[int, tuple[Inode, str]] = {}
        self._next_fd = 1000

    # -- what the store sees ----------------------------------------------------------------------

    def open(
        self,
        path: str,
        *,
        create: bool = False,
        exclusive: bool = False,
        write: bool = True,  # noqa: ARG002
    ) -> int:
        inode = self.names.get(path)
        if inode is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if os.path.dirname(path) not in self.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = Inode()
            self._name(path, inode)
        elif exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        fd = self._next_fd
        self._next_fd += 1
        self._open[fd] = (inode, path)
        return fd

    def close(self, fd: int) -> None:
        del self._open[fd]

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        return bytes(self._open[fd][0].data[offset : offset + length])

    def pread_cached(self, fd: int, length: int, offset: int) -> Buffer | None:
        return self._open[fd][0].data[offset : offset + length]

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        inode, path = self._open[fd]
        self._apply(inode.data, Change(offset, bytes(data)))
        inode.pending.append(Change(offset, bytes(data)))
        self.after("pwrite", path)
        return len(data)

    def fdatasync(self, fd: int) -> None:
        inode, path = self._open[fd]
        inode.durable = bytes(inode.data)
        inode.pending.clear()
        self.after("fdatasync", path)

    def fsync_dir(self, path: str) -> None:
        kept = []
        for change in self.pending_names:
            if os.path.dirname(change.path) == path:
                self._rename_in(self.durable_names, change)
            else:
                kept.append(change)
        self.pending_names = kept
        self.after("fsync_dir", path)

    def reserve(self, fd: int, length: int) -> None:
        inode, path = self._open[fd]
        if len(inode.data) < length:
            self._resize(inode, length)
        self.after("reserve", path)

    def truncate(self, fd: int, length: int) -> None:
        inode, path = self._open[fd]
        if len(inode.data) != length:
            self._resize(inode, length)
        self.after("truncate", path)

    def _resize(self, inode: Inode, length: int) -> None:
        self._apply(inode.data, Change(length, None))
        inode.pending.append(Change(length, None))

    def next_data(self, fd: int, offset: int) -> int | None:
        return offset if offset < len(self._open[fd][0].data) else None

    def rename(self, source: str, target: str) -> None:
        inode = self.names[source]
        self._name(target, inode)
        self._name(source, None)
        self.after("rename", source)

    def unlink(self, path: str) -> None:
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._name(path, None)
        self.after("unlink", path)

    def rmdir(self, path: str) -> None:
        if any(os.path.dirname(other) == path for other in self.names):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._name(path, None)
        self.after("rmdir", path)

    def makedirs(self, path: str) -> None:
        if path in self.names:
            return
        self.makedirs(os.path.dirname(path))
        self._name(path, Inode(is_dir=True))
        self.after("makedirs", path)

    def listdir(self, path: str) -> list[str]:
        return sorted(
            os.path.basename(other) for other in self.names if other != "/" and os.path.dirname(other) == path
        )

    def facts(self, path: str) -> FileFacts | None:
        inode = self.names.get(path)
        return None if inode is None else FileFacts(len(inode.data), 0, len(inode.data))

    def is_dir(self, path: str) -> bool:
        inode = self.names.get(path)
        return inode is not None and inode.is_dir

    def usage(self, path: str) -> DiskUsage:  # noqa: ARG002
        return DiskUsage(100, 10, 90)

    def try_lock(self, fd: int) -> bool:  # noqa: ARG002
        return True

    def locked(self, fd: int) -> bool:  # noqa: ARG002
        return False

    # -- changes ----------------------------------------------------------------------------------

    def _name(self, path: str, inode: Inode | None) -> None:
        change = NameChange(path, inode)
        self._rename_in(self.names, change)
        self.pending_names.append(change)

    @staticmethod
    def _rename_in(names: dict[str, Inode], change: NameChange) -> None:
        if change.inode is None:
            names.pop(change.path, None)
        else:
            names[change.path] = change.inode

    @staticmethod
    def _apply(data: bytearray, change: Change) -> None:
        if change.data is None:
            del data[change.offset :]
            data.extend(bytes(change.offset - len(data)))
        else:
            data.extend(bytes(max(0, change.offset - len(data))))
            data[change.offset : change.offset + len(change.data)] = change.data

    # -- power failures ---------------------------------------------------------------------------

    def image(self, names: int, keep: Callable[[Inode, int, Change], list[Change]]) -> Image:
        """The state with the first `names` pending name changes, and of each file's pending changes what
        `keep` (file, number of the change, change) makes of them."""
        present = dict(self.durable_names)
        for name_change in self.pending_names[:names]:
            self._rename_in(present, name_change)
        image: Image = {}
        for path, inode in present.items():
            if os.path.dirname(path) not in present:
                continue  # its directory's name is lost, and everything in it
            if inode.is_dir:
                image[path] = None
                continue
            data = bytearray(inode.durable)
            for number, change in enumerate(inode.pending):
                for part in keep(inode, number, change):
                    self._apply(data, part)
            image[path] = bytes(data)
        return {path: content for path, content in image.items() if self._reachable(path, image)}

    @staticmethod
    def _reachable(path: str, image: Image) -> bool:
        while path != "/":
            path = os.path.dirname(path)
            if path not in image:
                return False
        return True

    def crash_images(self, chance: random.Random, samples: int) -> Iterator[Image]:
        """States that a power failure now may leave: nothing pending has arrived, everything has,
        everything but one, nothing but one, the last write torn at each sector; then `samples` random
        ones. May repeat itself."""
        pending = [
            (inode, number) for inode in set(self.names.values()) for number in range(len(inode.pending))
        ]
        everything, none = len(self.pending_names), 0
        for names in {none, everything}:
            yield self.image(names, lambda _inode, _number, _change: [])
            yield self.image(names, lambda _inode, _number, change: [change])
        for names in range(1, everything):
            yield self.image(names, lambda _inode, _number, change: [change])
        for inode, number in pending:
            one = (inode, number)
            yield self.image(everything, lambda i, n, c, one=one: [] if (i, n) == one else [c])  # type: ignore[misc]
            yield self.image(everything, lambda i, n, c, one=one: [c] if (i, n) == one else [])  # type: ignore[misc]
        yield from self._torn(everything)
        for _ in range(samples):
            yield self._random(chance)

    def _torn(self, names: int) -> Iterator[Image]:
        for inode in {inode for inode in self.names.values() if inode.pending}:
            last = len(inode.pending) - 1
            sectors = _sectors(inode.pending[last])
            for count in range(1, len(sectors)):
                for part in (sectors[:count], sectors[count:]):

                    def keep(
                        i: Inode, n: int, c: Change, inode: Inode = inode, part: list[Change] = part
                    ) -> list[Change]:
                        return part if i is inode and n == last else [c]  # noqa: B023 - used at once

                    yield self.image(names, keep)

    def _random(self, chance: random.Random) -> Image:
        share = chance.choice((0.1, 0.5, 0.9))
        lengths: dict[int, int] = {}

        def keep(inode: Inode, number: int, change: Change) -> list[Change]:
            if change.data is None:  # lengths arrive in order: once one is missing, so are the later ones
                arrived = lengths.setdefault(id(inode), chance.randrange(len(inode.pending) + 1))
                return [change] if number < arrived else []
            return [part for part in _sectors(change) if chance.random() < share]

        return self.image(chance.randrange(len(self.pending_names) + 1), keep)


def _sectors(change: Change) -> list[Change]:
    """A write as the writes of its sectors."""
    if change.data is None:
        return [change]
    parts = []
    at, end = change.offset, change.offset + len(change.data)
    while at < end:
        stop = min(end, at - at % SECTOR + SECTOR)
        parts.append(Change(at, change.data[at - change.offset : stop - change.offset]))
        at = stop
    return parts
