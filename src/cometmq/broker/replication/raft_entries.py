"""The log of a raft member as its node sees it, and the bytes of entries."""

from __future__ import annotations

import msgspec

from cometmq.errors import StoreError
from cometmq.protocol.record.framing import EntryHead
from cometmq.raft import AppendOwn, AppendRequest
from cometmq.store import Buffer, Ledger

MOST_FRAME = 1 << 20
"""Bytes of the entries of one message; a longer entry goes alone."""


class NodeLog:
    """What the node sees of the log."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.term_of = ledger.term_of

    @property
    def first(self) -> int:
        return self._ledger.first

    @property
    def last(self) -> int:
        return self._ledger.last

    def fit(self, first: int, stop: int) -> int:
        """Entries of one frame."""
        try:
            return self._ledger.range(first, stop, MOST_FRAME).stop
        except (StoreError, OSError):  # to be sent it is looked up again
            return first + 1


def with_entries(message: AppendRequest, data: Buffer) -> AppendRequest:
    """The message as it is sent."""
    return msgspec.structs.replace(message, payload=bytes(data))


def behind(payload: bytes, count: int) -> bytes:
    """Entries without the first `count` of them."""
    at = 0
    for _ in range(count):
        at += EntryHead.read(payload, at).size
    return payload[at:] if at else payload


def body_of(change: AppendOwn) -> bytes:
    """What an entry says that is no message."""
    if change.members is None:
        return msgspec.json.encode({"type": "term", "term": change.term})
    members = change.members.members
    return msgspec.json.encode(
        {"type": "members", "voters": sorted(members.voters), "learners": sorted(members.learners)}
    )
