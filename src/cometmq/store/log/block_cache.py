"""A cache of recently read blocks of the log.

Consumers that drain several queues of a topic each request single records of the same part of the log.
Reading one block for all of them needs one copy from the page cache instead of one per queue. It saves time
once a few records of the block were requested, by one pull or by several. Blocks lie completely before the
end of the log, so they never change; readers get views of them.
"""

from __future__ import annotations

BLOCK = 128 << 10
_KEPT = 64  # blocks: 8 MiB; enough for 32 records that lie far apart, and the blocks after them
DENSE = 4  # number of requested records from which on their block is loaded
_MAX_COUNTED_BLOCKS = 4096


class BlockCache:
    """The blocks loaded last, by number (log position // BLOCK). The oldest one is dropped first."""

    __slots__ = ("_blocks", "_requested", "get")

    def __init__(self) -> None:
        self._blocks: dict[int, memoryview] = {}
        self._requested: dict[int, int] = {}  # records requested of blocks that are not cached
        self.get = self._blocks.get

    def should_load(self, number: int, requested: int) -> bool:
        """Return whether to load a block that is not cached, for `requested` more records."""
        requested += self._requested.pop(number, 0)
        if requested >= DENSE:
            return True
        if len(self._requested) >= _MAX_COUNTED_BLOCKS:
            self._requested.clear()
        self._requested[number] = requested
        return False

    def put(self, number: int, block: memoryview) -> None:
        self._blocks[number] = block
        if len(self._blocks) > _KEPT:
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        self._blocks.clear()
        self._requested.clear()
