"""Which half messages are open. No I/O in here.

Half messages have consecutive offsets in one queue. An open one is neither committed nor rolled back nor
given up, and no later copy stands for it. Everything in front of `head` is closed; behind it a bit for each
message says so, so that a million half messages cost 125 kB.
"""

from __future__ import annotations

CHUNK = 4096  # bits that are kept in one number
MOST_COPIED = 100_000
"""Transactions whose newest copy is remembered. Ends that name an older copy of others are refused, and the
next check decides."""


class Ledger:
    """Offsets of half messages, open or closed. `taken`: those of which the end is being written."""

    __slots__ = ("_closed", "_newest", "_taken", "head")

    def __init__(self, head: int = 0) -> None:
        self.head = head
        self._closed: dict[int, int] = {}
        self._taken: set[int] = set()
        self._newest: dict[int, int] = {}

    def clear(self) -> None:
        """Know of no half message."""
        self.head = 0
        self._closed.clear()
        self._taken.clear()
        self._newest.clear()

    def is_open(self, offset: int) -> bool:
        """Whether this message may be ended, or copied, now."""
        return offset >= self.head and not self._bit(offset) and offset not in self._taken

    def _bit(self, offset: int) -> int:
        chunk, bit = divmod(offset, CHUNK)
        return self._closed.get(chunk, 0) >> bit & 1

    def next_open(self, offset: int) -> int:
        """The first offset from this one on that is not closed."""
        chunk, bit = divmod(max(offset, self.head), CHUNK)
        while True:
            closed = self._closed.get(chunk, 0) >> bit
            bit += (~closed & closed + 1).bit_length() - 1
            if bit < CHUNK:
                return chunk * CHUNK + bit
            chunk, bit = chunk + 1, 0

    def count_open(self, end: int) -> int:
        """How many messages in front of `end` are not closed."""
        if end <= self.head:
            return 0
        (first, low), (last, high) = divmod(self.head, CHUNK), divmod(end, CHUNK)
        closed = 0
        for chunk, bits in self._closed.items():
            if first <= chunk <= last:
                bits &= (1 << high) - 1 if chunk == last else -1
                closed += (bits >> low if chunk == first else bits).bit_count()
        return end - self.head - closed

    # -- what becomes of messages

    def take(self, offset: int) -> None:
        """Its end, or a copy of it, is on its way into the log."""
        self._taken.add(offset)

    def give_back(self, offset: int) -> None:
        """It did not get there."""
        self._taken.discard(offset)

    def close(self, offset: int) -> None:
        """It did."""
        self._taken.discard(offset)
        self.close_range(offset, offset + 1)

    def close_range(self, start: int, stop: int) -> None:
        """All of these are closed, or gone."""
        start = max(start, self.head)
        while start < stop:
            chunk, bit = divmod(start, CHUNK)
            count = min(stop - start, CHUNK - bit)
            self._closed[chunk] = self._closed.get(chunk, 0) | ((1 << count) - 1) << bit
            start += count

    def advance(self, end: int) -> None:
        """Let the head pass what is closed, up to the end of the queue."""
        head = min(self.next_open(self.head), end)
        for chunk in range(self.head // CHUNK, head // CHUNK):
            self._closed.pop(chunk, None)
        self.head = head

    # -- copies

    def copied(self, first: int, copy: int) -> None:
        """The transaction that began at `first` has a new copy, which stands for it."""
        if first in self._newest or len(self._newest) < MOST_COPIED:
            self._newest[first] = copy

    def ended(self, first: int, offset: int) -> None:
        """The transaction that began at `first` has ended with its copy at `offset`."""
        if self._newest.get(first) == offset:
            del self._newest[first]

    def standing_for(self, first: int, offset: int) -> int | None:
        """The open copy of a transaction, of which the one at `offset` is named; None if there is none."""
        if self.is_open(offset):
            return offset
        newest = self._newest.get(first)
        return newest if newest is not None and self.is_open(newest) else None
