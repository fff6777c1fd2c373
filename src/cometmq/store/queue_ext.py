"""Ext units: what Apache's broker keeps of a message beside its queue unit with `enableConsumeQueueExt`.

The unit's tags code is then an address: a byte position in the files of consumequeue_ext/<topic>/<queue id>,
plus the smallest i8. An ext unit is i2 size (20 + bitmap), i8 tags code, i8 store time, i2 length of the
bitmap, bitmap (storage fact sheet 2.8). CometMQ reads such queues and writes none.
"""

from __future__ import annotations

import os
import struct

from cometmq.store.consume_queue import file_name
from cometmq.store.reads import ReadOnlyFiles

LEAST_CODE = -0x80000000
"""The least tags code that is a hash; what is less is an address."""
HEAD = struct.Struct(">hqqh")
_LOWEST = -(1 << 63)


class ExtUnits:
    """The ext units of one store, read from outside."""

    __slots__ = ("_bases", "_files", "_root")

    def __init__(self, files: ReadOnlyFiles, root: str) -> None:
        self._files = files
        self._root = os.path.join(root, "consumequeue_ext")
        self._bases: dict[str, list[int]] = {}

    def tags_code(self, topic: str, queue_id: int, address: int) -> int | None:
        """The tags code that a unit with this address means; None if no ext unit is there."""
        if address >= LEAST_CODE:
            return None
        directory = os.path.join(self._root, topic, str(queue_id))
        bases = self._bases.get(directory)
        if bases is None:
            names = self._files.disk.listdir(directory)
            bases = self._bases[directory] = sorted(int(name) for name in names if name.isdecimal())
        position = address - _LOWEST
        base = max((base for base in bases if base <= position), default=-1)
        if base < 0:
            return None
        data = self._files.read(os.path.join(directory, file_name(base)), HEAD.size, position - base)
        if len(data) < HEAD.size:
            return None
        size, tags, _, bitmap = HEAD.unpack(data)
        return int(tags) if size == HEAD.size + bitmap and bitmap >= 0 else None
