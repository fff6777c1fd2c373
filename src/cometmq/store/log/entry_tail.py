"""The newest entries of a raft log: those that its index does not hold yet.

They get into the index once they are on the device: what the index names has been there.
"""

from __future__ import annotations

from cometmq.protocol.record.framing import ENTRY_SIZE, encode_entry_head


class EntryTail:
    """Entries from index `first` on, by columns. Positions and sizes are those of whole entries, in bytes.

    term: of the entries that `head` makes.
    """

    __slots__ = ("first", "positions", "sizes", "term", "terms")

    def __init__(self, first: int) -> None:
        self.first = first
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.terms: list[int] = []
        self.term = -1

    @property
    def next(self) -> int:
        """Index of the next entry."""
        return self.first + len(self.positions)

    def head(self, position: int, record_size: int) -> bytes:
        """Take the next entry in, which begins at this log position. Returns what stands in front of its
        record."""
        head = encode_entry_head(self.first + len(self.positions), self.term, position, record_size)
        self.positions.append(position)
        self.sizes.append(record_size + ENTRY_SIZE)
        self.terms.append(self.term)
        return head

    def take_back(self, count: int) -> None:
        """The last `count` entries do not exist."""
        for column in (self.positions, self.sizes, self.terms):
            del column[len(column) - count :]

    def forget(self, count: int) -> None:
        """The first `count` entries are in the index."""
        for column in (self.positions, self.sizes, self.terms):
            del column[:count]
        self.first += count
