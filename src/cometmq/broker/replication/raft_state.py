"""The durable state of a raft member beside its log: term, vote, and the entries about the group's members.

The file `currterm` with term and vote has DLedger's format (docs/reference/storage.md, DLedger files), so
Apache's broker can read it, too. The file `members.json` is CometMQ's own. It contains those log entries that
define the members of the group. It is written before the log, so it may contain entries that were never
written to the log; `load` omits those. The store records whether the log is suspect, that is lost or damaged;
`save` removes this record once the log is complete.

A member that has neither log nor state is either new, or has lost its disk. These cases cannot be
distinguished, so its log counts as suspect, and its term and vote as lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import msgspec

from cometmq import logs
from cometmq.errors import CometError, StoreError
from cometmq.periodic import Tasks
from cometmq.protocol.record.framing import EntryHead
from cometmq.raft import AnyMessage, AppendOwn, AppendRequest, HardState, Members, MembersEntry
from cometmq.store import CACHED, Buffer, Disk, MessageStore, NotInMemory, Reads, read_file, replace_file
from cometmq.store.raft_log import (
    RaftLog,
    TermAndVote,
    has_forgotten,
    is_suspect,
    read_term,
    remove_suspect,
    write_term,
)

log = logs.logger(__name__)

_FILE = "members.json"
_LIMIT = 1 << 20  # Maximum size of `members.json`, in bytes


class _Kept(msgspec.Struct):
    members: tuple[MembersEntry, ...]


def load(disk: Disk, raft_log: RaftLog, voters: frozenset[str]) -> HardState:
    """Read the state of this member. A new group begins with `voters`. Raises StoreError or OSError."""
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
    # This file may contain membership changes that are not in the log. Remove them now: once the oldest log
    # entries have been deleted, `_is_in` could no longer recognise such changes, and would accept them.
    if members != found.members:
        replace_file(disk, path, msgspec.json.encode(_Kept(members)))
    suspect, forgot = is_suspect(disk, raft_log.directory), has_forgotten(disk, raft_log.directory)
    return HardState(max(kept.term, 0), kept.vote, members, suspect, forgot)


def _is_in(entry: MembersEntry, raft_log: RaftLog) -> bool:
    """Return whether the log contains an entry, or contained it before the oldest entries were deleted."""
    if entry.index < raft_log.first:
        return True
    return entry.index <= raft_log.last and raft_log.term_of(entry.index) == entry.term


def before_cut(state: HardState, before: HardState) -> HardState:
    """Return the state to be saved before the log is truncated: it still has all changes of the members.

    If the broker crashes before the truncation is complete, the log still contains these changes, and they
    are still valid.
    """
    if set(before.members) <= set(state.members):
        return state
    members = sorted({*state.members, *before.members}, key=lambda entry: (entry.index, entry.term))
    return msgspec.structs.replace(state, members=tuple(members))


def save(disk: Disk, directory: str, state: HardState, before: HardState) -> None:
    """Write the parts of `state` that differ from `before` to the disk. Must run in a thread."""
    whole = before.suspect and not state.suspect
    if whole or state.members != before.members:
        replace_file(disk, os.path.join(directory, _FILE), msgspec.json.encode(_Kept(state.members)))
    if (state.term, state.vote) != (before.term, before.vote):
        write_term(disk, directory, TermAndVote(state.term, state.vote))
    if whole:
        remove_suspect(disk, directory)


MAX_MESSAGE_BYTES = 1 << 20
"""The maximum number of bytes of entries in one message. A larger entry is sent in its own message."""


class NodeLog:
    """The log, with the methods and properties that the raft node requires."""

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
        try:
            return self._raft_log.range(first, stop, MAX_MESSAGE_BYTES).stop
        except (StoreError, OSError):  # The error is raised again when the entry is read for sending
            return first + 1


class EntryReads:
    """The reading of the log entries that messages contain.

    Args:
        send: Sends a message whose entries a thread has read.
    """

    def __init__(self, raft_log: RaftLog, store: MessageStore, send: Callable[[AppendRequest], None]) -> None:
        self._raft_log = raft_log
        self._executor = store.executor
        self._send = send
        self.tasks = Tasks()

    def load(self, message: AnyMessage) -> AnyMessage | None:
        """Return a message with its log entries, or None if a thread has to read them from the disk first."""
        if not isinstance(message, AppendRequest) or not message.count:
            return message
        first = message.prev_index + 1
        try:
            entries = self._raft_log.range(first, first + message.count, 1 << 62)
            question = partial(self._raft_log.read, entries)
            return msgspec.structs.replace(message, payload=bytes(question(CACHED)))
        except NotInMemory as miss:
            self.tasks.start(self._read(message, question, miss))
        except (CometError, OSError) as error:
            # Only this message is lost: the failure must not stop messages to other members.
            self._log_unread(message, error)
        return None

    async def _read(
        self, message: AppendRequest, question: Callable[[Reads], Buffer], miss: NotInMemory
    ) -> None:
        try:
            data = await self._executor.query(question, miss)
        except (CometError, OSError) as error:
            self._log_unread(message, error)
            return
        self._send(msgspec.structs.replace(message, payload=bytes(data)))

    def _log_unread(self, message: AppendRequest, error: Exception) -> None:
        log.error("raft: could not read the entries for member %s: %s", message.to, error)


def behind(payload: bytes, count: int) -> bytes:
    """Return encoded log entries without the first `count` entries."""
    at = 0
    for _ in range(count):
        at += EntryHead.read(payload, at).size
    return payload[at:] if at else payload


def body_of(change: AppendOwn) -> bytes:
    """Return the body of an entry that contains no message, but a new term or the group's members."""
    if change.members is None:
        return msgspec.json.encode({"type": "term", "term": change.term})
    members = change.members.members
    return msgspec.json.encode(
        {"type": "members", "voters": sorted(members.voters), "learners": sorted(members.learners)}
    )
