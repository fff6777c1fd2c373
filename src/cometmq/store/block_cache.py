"""Blocks of the log that were read a moment ago.

Consumers that drain several queues of a topic ask for the same stretch of the log once per queue, a record
here and a record there. Reading such a stretch as one block and keeping it for the others costs one copy
from the page cache instead of one per queue. Blocks lie wholly before the end of the log, so they never
change; readers get views of them.
"""

from __future__ import annotations

from collections import OrderedDict

BLOCK = 128 << 10
_KEPT = 24  # blocks: 3 MiB


class BlockCache:
    """The blocks used last, by number (log position // BLOCK)."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def get(self, number: int) -> memoryview | None:
        block = self._blocks.get(number)
        if block is not None:
            self._blocks.move_to_end(number)
        return block

    def put(self, number: int, block: memoryview) -> None:
        self._blocks[number] = block
        if len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()
