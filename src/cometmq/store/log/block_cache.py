"""Blocks of the log that were read a moment ago.

Consumers that drain several queues of a topic each ask for a record here and there of the same stretch of the
log. One block read and kept for all of them is one copy from the page cache instead of one per queue. It is
worth that once a few of its records were asked for, by one pull or by several. Blocks lie wholly before the
end of the log, so they never change; readers get views of them.
"""

from __future__ import annotations

BLOCK = 128 << 10
_KEPT = 64  # blocks: 8 MiB; those of 32 records that lie far apart, and their successors
DENSE = 4  # records asked for that make loading their block worth while
_MOST_COUNTED = 4096


class BlockCache:
    """The blocks loaded last, by number (log position // BLOCK). The oldest goes first."""

    __slots__ = ("_asked", "_blocks", "get")

    def __init__(self) -> None:
        self._blocks: dict[int, memoryview] = {}
        self._asked: dict[int, int] = {}  # records asked for of blocks that are not kept
        self.get = self._blocks.get

    def worth(self, number: int, asked: int) -> bool:
        """Whether to load a block that is not kept, now that `asked` more of its records are wanted."""
        asked += self._asked.pop(number, 0)
        if asked >= DENSE:
            return True
        if len(self._asked) >= _MOST_COUNTED:
            self._asked.clear()
        self._asked[number] = asked
        return False

    def put(self, number: int, block: memoryview) -> None:
        self._blocks[number] = block
        if len(self._blocks) > _KEPT:
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        self._blocks.clear()
        self._asked.clear()
