"""A cache of recently read blocks of the log.

Consumers that drain several queues of a topic each request single records of the same part of the log.
Reading one block for all of them needs one copy from the page cache instead of one per queue. This saves time
if at least a few records of the block are requested, by one pull or by several. A block is cached only if it
lies completely before the end of the log, so it never changes, and readers get views of it.
"""

from __future__ import annotations

BLOCK = 128 << 10
# Maximum number of cached blocks (8 MiB): enough for two pulls of 32 records, each in a block of its own
_KEPT = 64
DENSE = 4  # Number of records requested from a block after which the whole block is loaded and cached
_MAX_COUNTED_BLOCKS = 4096


class BlockCache:
    """The most recently loaded blocks, by number (log position // BLOCK). The oldest is dropped first."""

    __slots__ = ("_blocks", "_requested", "get")

    def __init__(self) -> None:
        self._blocks: dict[int, memoryview] = {}
        self._requested: dict[int, int] = {}  # Number of records requested so far from each uncached block
        self.get = self._blocks.get

    def should_load(self, number: int, requested: int) -> bool:
        """Return whether to load an uncached block, because at least DENSE of its records were requested.

        `requested` is the number of records of this block that the current request needs. If the result is
        False, later calls for the block count these records, too.
        """
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
