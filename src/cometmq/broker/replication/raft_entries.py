"""The log of a raft member as its node sees it, and the encoding of entries."""

from __future__ import annotations

import msgspec

from cometmq.errors import StoreError
from cometmq.protocol.record.framing import EntryHead
from cometmq.raft import AppendOwn, AppendRequest
from cometmq.store import Buffer, RaftLog

MAX_MESSAGE_BYTES = 1 << 20
"""Maximum of bytes of the entries of one message. A longer entry is sent in a message of its own."""


class NodeLog:
    """The node's view of the log."""

    def __init__(self, raft_log: RaftLog) -> None:
        self._raft_log = raft_log
        self.term_of = raft_log.term_of

    @property
    def first(self) -> int:
        return self._raft_log.first

    @property
    def last(self) -> int:
        return self._raft_log.last

    def fit(self, first: int, stop: int) -> int:
        """Return how many entries from `first` on fit into one frame."""
        try:
            return self._raft_log.range(first, stop, MAX_MESSAGE_BYTES).stop
        except (StoreError, OSError):  # The entry is read again before it is sent.
            return first + 1


def with_entries(message: AppendRequest, data: Buffer) -> AppendRequest:
    """Return the message with the bytes of its entries."""
    return msgspec.structs.replace(message, payload=bytes(data))


def behind(payload: bytes, count: int) -> bytes:
    """Return the entries without the first `count`."""
    at = 0
    for _ in range(count):
        at += EntryHead.read(payload, at).size
    return payload[at:] if at else payload


def body_of(change: AppendOwn) -> bytes:
    """Return the body of an entry that holds no message."""
    if change.members is None:
        return msgspec.json.encode({"type": "term", "term": change.term})
    members = change.members.members
    return msgspec.json.encode(
        {"type": "members", "voters": sorted(members.voters), "learners": sorted(members.learners)}
    )
