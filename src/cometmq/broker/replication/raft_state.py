"""The state that a raft member keeps beside its log: DLedger's term and vote, and the members of the group.

`currterm` (docs/reference/storage.md, DLedger files) can be read by both brokers. `members.json` is CometMQ's
own: the members entries of the log. It is written before the log changes, so it may name entries that were
never written; `load` omits those. The store records whether the log is suspect, and `save` can end that
state.

A member without any of this state is new, or has lost its disk. The two cases cannot be distinguished, so its
log is suspect, and its term and vote count as lost.
"""

from __future__ import annotations

import os

import msgspec

from cometmq.errors import StoreError
from cometmq.protocol.record.framing import EntryHead
from cometmq.raft import AppendOwn, AppendRequest, HardState, Members, MembersEntry
from cometmq.store import (
    Buffer,
    Disk,
    RaftLog,
    TermAndVote,
    has_forgotten,
    is_suspect,
    read_file,
    read_term,
    remove_suspect,
    replace_file,
    write_term,
)

_FILE = "members.json"
_LIMIT = 1 << 20  # maximum length of a file in bytes


class _Kept(msgspec.Struct):
    members: tuple[MembersEntry, ...]


def load(disk: Disk, raft_log: RaftLog, voters: frozenset[str]) -> HardState:
    """Read this member's state. voters: the members that the group starts with.

    Raises StoreError, OSError.
    """
    kept = read_term(disk, raft_log.directory) or TermAndVote()
    path = os.path.join(raft_log.directory, _FILE)
    try:
        found = msgspec.json.decode(read_file(disk, path, _LIMIT), type=_Kept)
    except FileNotFoundError:
        found = _Kept((MembersEntry(-1, -1, Members(voters)),))
        if raft_log.last < 0 and kept == TermAndVote():
            raft_log.record_loss("no log, vote or members are here: the member is new, or its disk is")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"cannot be read: {error}", path) from None
    members = tuple(entry for entry in found.members if _is_in(entry, raft_log))
    # Without this write the omitted entries would return once the log begins after them.
    if members != found.members:
        replace_file(disk, path, msgspec.json.encode(_Kept(members)))
    suspect, forgot = is_suspect(disk, raft_log.directory), has_forgotten(disk, raft_log.directory)
    return HardState(max(kept.term, 0), kept.vote, members, suspect, forgot)


def _is_in(entry: MembersEntry, raft_log: RaftLog) -> bool:
    """Return whether the log contains the entry, or begins after it."""
    if entry.index < raft_log.first:
        return True
    return entry.index <= raft_log.last and raft_log.term_of(entry.index) == entry.term


def before_cut(state: HardState, before: HardState) -> HardState:
    """Return the state to save before the log is cut, with the members entries that the cut removes.

    Until the cut is done these entries are in the log, and after a crash they would still be in effect.
    """
    if set(before.members) <= set(state.members):
        return state
    members = sorted({*state.members, *before.members}, key=lambda entry: (entry.index, entry.term))
    return msgspec.structs.replace(state, members=tuple(members))


def save(disk: Disk, directory: str, state: HardState, before: HardState) -> None:
    """Write what has changed since `before`, durably. Runs in a thread. Raises OSError."""
    whole = before.suspect and not state.suspect
    if whole or state.members != before.members:
        replace_file(disk, os.path.join(directory, _FILE), msgspec.json.encode(_Kept(state.members)))
    if (state.term, state.vote) != (before.term, before.vote):
        write_term(disk, directory, TermAndVote(state.term, state.vote))
    if whole:
        remove_suspect(disk, directory)


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
        """Return how many entries from `first` on, before `stop`, fit into one frame."""
        try:
            return self._raft_log.range(first, stop, MAX_MESSAGE_BYTES).stop
        except (StoreError, OSError):  # The error appears again when the entry is read for sending.
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
