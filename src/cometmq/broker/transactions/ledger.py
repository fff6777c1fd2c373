"""The bitmap of open and closed half messages. It does no I/O.

Half messages have consecutive offsets in one queue. A half message is open if it was not committed, rolled
back or given up, and no later copy replaces it. All half messages before `head` are closed. Each later one
has a bit, so a million half messages take 125 kB.
"""

from __future__ import annotations

CHUNK = 4096  # number of half messages (bits) in one integer of the bitmap
MAX_COPIES = 100_000
"""The maximum number of transactions whose newest copy is recorded.

In any other transaction, an end that names an older copy is refused; the producer is asked in the next check.
"""


class Ledger:
    """The state of all half messages.

    `_taken` has the offsets of the half messages whose end or copy is being written.
    """

    __slots__ = ("_closed", "_newest", "_taken", "head")

    def __init__(self, head: int = 0) -> None:
        self.head = head
        self._closed: dict[int, int] = {}
        self._taken: set[int] = set()
        self._newest: dict[int, int] = {}

    def clear(self) -> None:
        """Forget all half messages."""
        self.head = 0
        self._closed.clear()
        self._taken.clear()
        self._newest.clear()

    def is_open(self, offset: int) -> bool:
        """Return whether a half message is open, and neither its end nor a copy is being written."""
        chunk, bit = divmod(offset, CHUNK)
        return offset >= self.head and not self._closed.get(chunk, 0) >> bit & 1 and offset not in self._taken

    def next_open(self, offset: int) -> int:
        """Return the offset of the first half message, from `offset` on, that is not closed."""
        chunk, bit = divmod(max(offset, self.head), CHUNK)
        while True:
            closed = self._closed.get(chunk, 0) >> bit
            bit += (~closed & closed + 1).bit_length() - 1
            if bit < CHUNK:
                return chunk * CHUNK + bit
            chunk, bit = chunk + 1, 0

    def count_open(self, end: int) -> int:
        """Return the number of half messages before the offset `end` that are not closed."""
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
        """Record that the end or a copy of a half message is being written."""
        self._taken.add(offset)

    def give_back(self, offset: int) -> None:
        """Record that the end or copy of a half message was not written, so the message is open again."""
        self._taken.discard(offset)

    def close(self, offset: int) -> None:
        """Record that the end or copy of a half message was written, so the half message is closed."""
        self._taken.discard(offset)
        if offset >= self.head:
            chunk, bit = divmod(offset, CHUNK)
            self._closed[chunk] = self._closed.get(chunk, 0) | 1 << bit

    def close_range(self, start: int, stop: int) -> None:
        """Close all half messages from `start` to before `stop`. Some of them may not exist."""
        start = max(start, self.head)
        while start < stop:
            chunk, bit = divmod(start, CHUNK)
            count = min(stop - start, CHUNK - bit)
            self._closed[chunk] = self._closed.get(chunk, 0) | ((1 << count) - 1) << bit
            start += count

    def advance(self, end: int) -> None:
        """Advance `head` to the first half message that is not closed, or to `end`, the end of the queue."""
        head = min(self.next_open(self.head), end)
        for chunk in range(self.head // CHUNK, head // CHUNK):
            self._closed.pop(chunk, None)
        self.head = head

    # -- copies

    def copied(self, first: int, copy: int) -> None:
        """Record the offset of the newest copy in the transaction that began at the offset `first`."""
        if first in self._newest or len(self._newest) < MAX_COPIES:
            self._newest[first] = copy

    def ended(self, first: int, offset: int) -> None:
        """Forget the newest copy of a transaction that has ended with the half message at `offset`.

        `first` is the offset at which the transaction began. If `offset` is not the newest copy's, nothing
        changes.
        """
        if self._newest.get(first) == offset:
            del self._newest[first]

    def standing_for(self, first: int, offset: int) -> int | None:
        """Return the offset of a transaction's open half message, or None if the transaction has ended.

        `first` is the offset at which the transaction began, and `offset` is the half message that a request
        names. If that half message is closed, the transaction's newest copy is used in its place.
        """
        if self.is_open(offset):
            return offset
        newest = self._newest.get(first)
        return newest if newest is not None and self.is_open(newest) else None
