"""Ext units: the data that Apache's broker stores beside a queue unit with `enableConsumeQueueExt`.

The tags code of such a queue unit is the address of an ext unit: a byte position in the files of
consumequeue_ext/<topic>/<queue id>, plus the smallest 64-bit integer. An ext unit consists of its size (2
bytes: 20 plus the length of the bitmap), the tags code (8 bytes), the store time (8 bytes), the length of the
bitmap (2 bytes), and the bitmap (docs/reference/storage.md, Queue extension). CometMQ reads such queues,
deletes their ext files together with the queue units that refer to them, and writes no ext files.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection

from cometmq.store.base.disk import Disk, is_numbered
from cometmq.store.base.files import ReadOnlyFiles
from cometmq.store.derived.consume_queue import file_name

MIN_HASH_CODE = -0x80000000
"""The smallest tags code that is a hash. Smaller codes are addresses of ext units."""
HEAD = struct.Struct(">hqqh")
_LOWEST = -(1 << 63)


_DIRECTORY = "consumequeue_ext"


class ExtFiles:
    """Lists and deletes the consume queue extension files of one store. For any thread. Raises OSError."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk = disk
        self._root = os.path.join(root, _DIRECTORY)

    def queues(self) -> list[tuple[str, int]]:
        """Return (topic, queue id) of each queue that has ext files."""
        return [
            (topic, int(name))
            for topic in self._disk.listdir(self._root)
            if self._is_own(os.path.join(self._root, topic))
            for name in self._disk.listdir(os.path.join(self._root, topic))
            if name.isascii() and name.isdecimal() and self._is_own(os.path.join(self._root, topic, name))
        ]

    def _is_own(self, path: str) -> bool:
        """Return whether a directory exists and is not behind a link."""
        return self._disk.is_dir(path) and not self._disk.is_link(path)

    def paths(self, topic: str, queue_id: int) -> list[str]:
        """Return the paths of all files of a queue, oldest first."""
        directory = os.path.join(self._root, topic, str(queue_id))
        if not self._is_own(directory):
            return []
        names = self._disk.listdir(directory)
        return [os.path.join(directory, name) for name in names if is_numbered(name, 20)]

    def paths_before(self, topic: str, queue_id: int, code: int) -> list[str]:
        """Return the ext files of a queue that end before the ext unit with the address `code`.

        `code` is the tags code of the queue's first unit that has not expired, so only expired units refer to
        these files. As in Apache's broker, the result is empty if `code` is a hash, or outside all files.
        """
        paths = self.paths(topic, queue_id)
        place = code - _LOWEST
        last = self._disk.facts(paths[-1]) if paths else None
        if code >= MIN_HASH_CODE or last is None or place >= int(os.path.basename(paths[-1])) + last.size:
            return []
        ends = [int(os.path.basename(path)) for path in paths[1:]]
        return [path for path, end in zip(paths, ends, strict=False) if end <= place]

    def drop_empty(self, topic: str, queue_id: int) -> None:
        """Remove the directories of a queue if they hold no files."""
        directory = os.path.join(self._root, topic)
        for path in (os.path.join(directory, str(queue_id)), directory):
            if self._is_own(path) and not self._disk.listdir(path):
                self._disk.rmdir(path)

    def remove(self, topics: Collection[str]) -> None:
        """Delete all ext files of the given topics."""
        for topic, queue_id in self.queues():
            if topic in topics:
                for path in self.paths(topic, queue_id):
                    self._disk.unlink(path)
                self.drop_empty(topic, queue_id)


class ExtUnits:
    """Read-only access to the ext units of a store, for tools."""

    def __init__(self, files: ReadOnlyFiles, root: str) -> None:
        self._files = files
        self._root = os.path.join(root, _DIRECTORY)
        self._bases: dict[str, list[int]] = {}

    def tags_code(self, topic: str, queue_id: int, address: int) -> int | None:
        """Return the tags code of the ext unit at an address, or None if there is no ext unit."""
        if address >= MIN_HASH_CODE:
            return None
        directory = os.path.join(self._root, topic, str(queue_id))
        bases = self._bases.get(directory)
        if bases is None:
            names = self._files.disk.listdir(directory)
            bases = self._bases[directory] = sorted(int(name) for name in names if is_numbered(name, 20))
        position = address - _LOWEST
        base = max((base for base in bases if base <= position), default=-1)
        if base < 0:
            return None
        data = self._files.read(os.path.join(directory, file_name(base)), HEAD.size, position - base)
        if len(data) < HEAD.size:
            return None
        size, tags, _, bitmap = HEAD.unpack(data)
        return int(tags) if size == HEAD.size + bitmap and bitmap >= 0 else None
