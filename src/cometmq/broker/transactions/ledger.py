"""The bitmap of open and closed half messages. It does no I/O.

Half messages have consecutive offsets in one queue. A half message is open if it was not committed, rolled
back or given up, and no later copy replaces it. All half messages before `head` are closed. Each later one
has a bit, so a million half messages take 125 kB.
"""

from __future__ import annotations

CHUNK = 4096  # number of half messages (bits) in one integer of the bitmap
MAX_COPIES = 100_000
"""The maximum number of transactions for which the offset of the half message's newest copy is saved.

Each transaction check names a new copy of the half message, but a producer may still answer an earlier check,
which named an older copy. If the offset of the newest copy is not saved, the broker refuses that answer, and
the producer has to answer the next check.
"""


class Ledger:
    """Which half messages are open or closed, and which copy of a half message is the newest one.

    `_taken` contains the offsets of half messages that a write in progress will close. `_newest` maps the
    offset at which a transaction began to the offset of the newest copy of its half message.
    """

    __slots__ = ("_closed", "_newest", "_taken", "head")

    def __init__(self, head: int = 0) -> None:
        self.head = head
        self._closed: dict[int, int] = {}
        self._taken: set[int] = set()
        self._newest: dict[int, int] = {}

    def clear(self) -> None:
        self.head = 0
        self._closed.clear()
        self._taken.clear()
        self._newest.clear()

    def is_open(self, offset: int) -> bool:
        """Return whether a half message is open and no write that closes it is in progress."""
        chunk, bit = divmod(offset, CHUNK)
        return offset >= self.head and not self._closed.get(chunk, 0) >> bit & 1 and offset not in self._taken

    def next_open(self, offset: int) -> int:
        """Return the offset of the first half message, from `offset` on, that is still open."""
        chunk, bit = divmod(max(offset, self.head), CHUNK)
        while True:
            closed = self._closed.get(chunk, 0) >> bit
            bit += (~closed & closed + 1).bit_length() - 1
            if bit < CHUNK:
                return chunk * CHUNK + bit
            chunk, bit = chunk + 1, 0

    def count_open(self, end: int) -> int:
        """Return the number of half messages before the offset `end` that are still open."""
        if end <= self.head:
            return 0
        (first, low), (last, high) = divmod(self.head, CHUNK), divmod(end, CHUNK)
        closed = 0
        for chunk, bits in self._closed.items():
            if first <= chunk <= last:
                bits &= (1 << high) - 1 if chunk == last else -1
                closed += (bits >> low if chunk == first else bits).bit_count()
        return end - self.head - closed

    # -- changes of state

    def take(self, offset: int) -> None:
        """Record that a write which closes the half message is in progress."""
        self._taken.add(offset)

    def give_back(self, offset: int) -> None:
        """Open the half message again, because the write which was to close it has failed."""
        self._taken.discard(offset)

    def close(self, offset: int) -> None:
        """Mark a half message as closed, for example after the write that closes it has succeeded."""
        self._taken.discard(offset)
        if offset >= self.head:
            chunk, bit = divmod(offset, CHUNK)
            self._closed[chunk] = self._closed.get(chunk, 0) | 1 << bit

    def close_range(self, start: int, stop: int) -> None:
        """Mark the offsets from `start` to `stop` - 1 as closed, also those without a half message."""
        start = max(start, self.head)
        while start < stop:
            chunk, bit = divmod(start, CHUNK)
            count = min(stop - start, CHUNK - bit)
            self._closed[chunk] = self._closed.get(chunk, 0) | ((1 << count) - 1) << bit
            start += count

    def advance(self, end: int) -> None:
        """Advance `head` to the first open half message, but at most to `end`, the end of the queue."""
        head = min(self.next_open(self.head), end)
        for chunk in range(self.head // CHUNK, head // CHUNK):
            self._closed.pop(chunk, None)
        self.head = head

    # -- copies

    def copied(self, first: int, copy: int) -> None:
        """Save the offset of the newest copy of a transaction that began at `first`, up to MAX_COPIES."""
        if first in self._newest or len(self._newest) < MAX_COPIES:
            self._newest[first] = copy

    def ended(self, first: int, offset: int) -> None:
        """Forget the newest copy of a transaction that began at `first`, if it is the one at `offset`."""
        if self._newest.get(first) == offset:
            del self._newest[first]

    def standing_for(self, first: int, offset: int) -> int | None:
        """Return the offset of the open half message of a transaction that a producer wants to end.

        This is the `offset` in the request or, if that half message is closed, the offset of its newest copy.
        Return None if the newest copy is closed or unknown. The transaction began at the offset `first`.
        """
        if self.is_open(offset):
            return offset
        newest = self._newest.get(first)
        return newest if newest is not None and self.is_open(newest) else None
