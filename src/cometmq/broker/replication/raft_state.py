"""The state that a raft member keeps beside its log: DLedger's term and vote, and the members of the group.

`currterm` (docs/reference/storage.md, DLedger files) is for both brokers. `members.json` is CometMQ's own:
the members entries of the log. It is written before the log changes, so it may name entries that were never
written; `load` omits those. The store records whether the log is suspect, and `save` ends that state.

A member without any of this state is new, or has lost its disk. The two cases cannot be distinguished, so its
log is suspect, and its term and vote count as lost.
"""

from __future__ import annotations

import os

import msgspec

from cometmq.errors import StoreError
from cometmq.raft import HardState, Members, MembersEntry
from cometmq.store import (
    Disk,
    RaftLog,
    TermAndVote,
    forget_suspect,
    has_forgotten,
    is_suspect,
    read_file,
    read_term,
    replace_file,
    write_term,
)

_FILE = "members.json"
_LIMIT = 1 << 20  # bytes


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
            raft_log.distrust("no log, vote or members are here: the member is new, or its disk is")
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
        forget_suspect(disk, directory)
