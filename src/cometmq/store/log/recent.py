"""The bytes of the log that are kept in memory: the newest bytes, and recently read blocks.

Records are encoded into chunks of memory. After they have been written, they stay readable in their chunk
until newer records reuse the chunk. Consumers that keep up are served from the chunks without a system call.
Keeping the bytes needs no copy; readers get copies, because chunks are reused. The chunks for small records
fit into a core's cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

CHUNK = 1 << 17
_LARGE = 1 << 20  # Length, in bytes, of a memory chunk for data that is longer than `CHUNK`
_NOWHERE = 1 << 62
_CHUNKS = 4  # Maximum number of memory chunks that hold bytes of the log

BLOCK = 128 << 10
# Maximum number of cached blocks (8 MiB): enough for two pulls of 32 records, each in a block of its own
_KEPT = 64
DENSE = 4  # Number of records requested from a block after which the whole block is loaded and cached
_MAX_COUNTED_BLOCKS = 4096


class RecentBytes:
    """The newest bytes of the log, which are kept in memory chunks."""

    def __init__(self) -> None:
        # Oldest first: first log position, end position, chunk, index of the first byte in the chunk
        self._parts: deque[tuple[int, int, bytearray, int]] = deque()
        self._chunks: deque[bytearray] = deque()
        # Unused chunks that `new_chunk` can return, by their length
        self._free: dict[int, list[bytearray]] = {CHUNK: [], _LARGE: []}
        self.start = _NOWHERE  # First log position whose byte is in memory

    def new_chunk(self, size: int, busy: Sequence[bytearray]) -> bytearray:
        """Return a chunk of memory with room for at least `size` bytes. Its old content has no meaning.

        If there are already `_CHUNKS` chunks, the oldest one is dropped. Its memory is reused later, unless
        the chunk is in `busy`: these chunks hold bytes that have not been written yet.
        """
        chunks, parts = self._chunks, self._parts
        while len(chunks) >= _CHUNKS:
            oldest = chunks.popleft()
            free = self._free.get(len(oldest))
            if free is not None and not any(oldest is chunk for chunk in busy):
                free.append(oldest)
        kept = set(map(id, chunks))
        while parts and id(parts[0][2]) not in kept:
            parts.popleft()
        self.start = parts[0][0] if parts else _NOWHERE
        length = CHUNK if size <= CHUNK else max(size, _LARGE)
        free = self._free.get(length)
        chunk = free.pop() if free else bytearray(length)
        chunks.append(chunk)
        return chunk

    def add(self, chunk: bytearray, place: int, position: int, length: int) -> None:
        """Record that the newest chunk holds `length` bytes of the log at its index `place`."""
        parts = self._parts
        if parts:
            first, end, last_chunk, start = parts[-1]
            if last_chunk is chunk and end == position and start + (end - first) == place:
                parts[-1] = (first, position + length, chunk, start)
                return
        else:
            self.start = position
        parts.append((position, position + length, chunk, place))

    def cut(self, end: int) -> None:
        """Drop all bytes at or after log position `end` from memory."""
        parts = self._parts
        while parts and parts[-1][0] >= end:
            parts.pop()
        if parts and parts[-1][1] > end:
            first, _, chunk, place = parts.pop()
            parts.append((first, end, chunk, place))
        if not parts:
            self.start = _NOWHERE

    def get(self, position: int, length: int) -> bytearray | None:
        """Return a copy of `length` bytes of the log if one chunk in memory holds all of them."""
        for first, end, chunk, place in reversed(self._parts):
            if position >= first:
                if position + length > end:
                    return None
                at = place + position - first
                return chunk[at : at + length]
        return None


class BlockCache:
    """The most recently loaded blocks, by number (log position // BLOCK). The oldest is dropped first.

    Consumers that drain several queues of a topic each request single records of the same part of the log.
    Reading one block for all of them needs one copy from the page cache instead of one per queue. This saves
    time if at least a few records of the block are requested, by one pull or by several. A block is cached
    only if it lies completely before the end of the log, so it never changes, and readers get views of it.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, memoryview] = {}
        self._requested: dict[int, int] = {}  # Number of records requested so far from each uncached block
        self.get = self._blocks.get

    def should_load(self, number: int, requested: int) -> bool:
        """Return whether to load a block: with this call, at least DENSE of its records are requested."""
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
