"""The newest entries of a raft log, which are not in the index of the log yet.

The index contains only durable entries, so an entry is added to it only after the entry was synced to disk.
"""

from __future__ import annotations

from cometmq.protocol.record.framing import ENTRY_SIZE, encode_entry_head


class EntryTail:
    """The entries from index `first` on. Each attribute with a plural name has one value per entry.

    Positions and sizes are those of whole entries. `term` is the current term, for new entry headers.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.positions: list[int] = []
        self.sizes: list[int] = []
        self.terms: list[int] = []
        self.term = -1

    @property
    def next(self) -> int:
        """The index that the next appended entry gets."""
        return self.first + len(self.positions)

    def head(self, position: int, record_size: int) -> bytes:
        """Add the next entry, which begins at log position `position`. Return the entry's header."""
        head = encode_entry_head(self.first + len(self.positions), self.term, position, record_size)
        self.positions.append(position)
        self.sizes.append(record_size + ENTRY_SIZE)
        self.terms.append(self.term)
        return head

    def remove_last(self, count: int) -> None:
        for column in (self.positions, self.sizes, self.terms):
            del column[len(column) - count :]

    def forget(self, count: int) -> None:
        """Remove the first `count` entries, because the index on disk contains them."""
        for column in (self.positions, self.sizes, self.terms):
            del column[:count]
        self.first += count
