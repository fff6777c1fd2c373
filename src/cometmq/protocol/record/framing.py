"""The framing of records in a log: plain, or as entries of a raft log.

A raft log has the format of DLedger 0.3.1 (docs/reference/storage.md, DLedger files). An entry is a header of
48 bytes, followed by a record. The blank that closes a segment differs from a plain log's.

    offset  type  field                      offset  type  field
    0       i4    magic: 1                   24      i8    log position of the entry
    4       i4    size of the whole entry    32      i4    channel: 0
    8       i8    index                      36      i4    CRC of the chain: 0
    16      i8    term                       40      i4    CRC of the body: 0
                                             44      i4    size of the record
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cometmq.protocol.record.layout import BLANK_SIZE, MAGIC_AT, START
from cometmq.protocol.record.one import encode_blank

_KINDS = "iiqqqiiii"
ENTRY = Struct(f">{_KINDS}")
ENTRY_SIZE = ENTRY.size
ENTRY_MAGIC = 1
ENTRY_BLANK_MAGIC = -1


class EntryHead(msgspec.Struct, frozen=True, gc=False):
    """The header of an entry in a raft log: the fields before the record."""

    magic: int
    size: int
    index: int
    term: int
    position: int
    channel: int
    chain_crc: int
    body_crc: int
    length: int

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview, at: int = 0) -> EntryHead:
        """Return the header of the raft log entry at data[at], which the data must contain."""
        return cls(*ENTRY.unpack_from(data, at))

    def holds(self, position: int) -> bool:
        """Return whether this header is valid for an entry at the log position `position`."""
        return (
            self.magic == ENTRY_MAGIC
            and self.position == position
            and self.size == self.length + ENTRY_SIZE > ENTRY_SIZE
            and self.index >= 0
            and self.term >= 0
        )


HEAD_KIND = np.dtype(
    [(name, f">{kind}") for name, kind in zip(EntryHead.__struct_fields__, _KINDS, strict=True)]
)


def follows(head: bytes, before: bytes, position: int, record_size: int) -> bool:
    """Return whether `head` can be the encoded header of the raft log entry at a log position.

    It must continue `before`, the encoded header of the previous entry, unless that is empty.
    """
    if len(head) < ENTRY_SIZE:
        return False
    this = EntryHead.read(head)
    if not this.holds(position) or this.length != record_size:
        return False
    last = EntryHead.read(before) if before else None
    return last is None or (this.index == last.index + 1 and this.term >= last.term)


def encode_entry_head(index: int, term: int, position: int, record_size: int) -> bytes:
    """Return the header of a raft log entry: the 48 bytes before its record."""
    size = record_size + ENTRY_SIZE
    return ENTRY.pack(ENTRY_MAGIC, size, index, term, position, 0, 0, 0, record_size)


class Framing(NamedTuple):
    """The framing of a log, plain or raft. `gap` is the number of bytes before each record."""

    gap: int

    def blank(self, rest: int) -> bytes:
        """Return the blank that closes a segment in which `rest` bytes are left."""
        return START.pack(ENTRY_BLANK_MAGIC, rest) if self.gap else encode_blank(rest)

    def is_blank(self, data: bytes | bytearray | memoryview, rest: int) -> bool:
        """Return whether `data` begins with the blank that closes a segment with `rest` bytes left."""
        return bytes(data[:BLANK_SIZE]) == self.blank(rest)

    @property
    def magic_at(self) -> int:
        """The number of bytes from the start of a log entry to the magic number of its record."""
        return self.gap + MAGIC_AT

    def heads_match(
        self, heads: NDArray[Any], position: NDArray[Any], size: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Return for each raft log entry whether its header is consistent.

        A consistent header contains the log position of its entry and the size of the entry's record, and its
        index and term can follow those of the previous header.
        """
        good = (heads["magic"] == ENTRY_MAGIC) & (heads["position"] == position - ENTRY_SIZE)
        good &= (heads["length"] == size) & (heads["size"] == size + ENTRY_SIZE) & (heads["term"] >= 0)
        index, term = heads["index"].astype(np.int64), heads["term"].astype(np.int64)
        good &= (index >= 0) & (index == index[0] + np.arange(len(index)))
        good[1:] &= term[1:] >= term[:-1]
        found: NDArray[np.bool_] = good
        return found


PLAIN = Framing(0)
ENTRIES = Framing(ENTRY_SIZE)
