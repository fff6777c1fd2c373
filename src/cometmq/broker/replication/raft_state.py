"""What a raft member keeps beside its log: term and vote as DLedger does, and what only our members know.

`currterm` (docs/reference/storage.md, DLedger files) is for either broker. `members.json` is ours: the
members entries of the log. It is written before the log changes, so it may name entries that never came to
be; `load` leaves those out. Whether the log is suspect the store says, and `save` when it is no more.

A member without any of this is a new one, or has lost its disk. Nobody can tell from here, so its log is
suspect, and its term and vote count as forgotten.
"""

from __future__ import annotations

import os

import msgspec

from cometmq.errors import StoreError
from cometmq.raft import HardState, Members, MembersEntry
from cometmq.store import (
    Disk,
    Ledger,
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


def load(disk: Disk, ledger: Ledger, voters: frozenset[str]) -> HardState:
    """What this member kept. voters: whom the group starts with. Raises StoreError, OSError."""
    kept = read_term(disk, ledger.directory) or TermAndVote()
    path = os.path.join(ledger.directory, _FILE)
    try:
        found = msgspec.json.decode(read_file(disk, path, _LIMIT), type=_Kept)
    except FileNotFoundError:
        found = _Kept((MembersEntry(-1, -1, Members(voters)),))
        if ledger.last < 0 and kept == TermAndVote():
            ledger.distrust("no log, vote or members are here: the member is new, or its disk is")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"cannot be read: {error}", path) from None
    members = tuple(entry for entry in found.members if _is_in(entry, ledger))
    if members != found.members:  # else they would be back when the log no longer begins in front of them
        replace_file(disk, path, msgspec.json.encode(_Kept(members)))
    suspect, forgot = is_suspect(disk, ledger.directory), has_forgotten(disk, ledger.directory)
    return HardState(max(kept.term, 0), kept.vote, members, suspect, forgot)


def _is_in(entry: MembersEntry, ledger: Ledger) -> bool:
    """Whether the log has the entry, or begins behind it."""
    if entry.index < ledger.first:
        return True
    return entry.index <= ledger.last and ledger.term_of(entry.index) == entry.term


def before_cut(state: HardState, before: HardState) -> HardState:
    """What is to be saved before the log is cut, with the members entries that the cut takes: until it is
    done they are in the log, and after a crash they would still hold."""
    if set(before.members) <= set(state.members):
        return state
    members = sorted({*state.members, *before.members}, key=lambda entry: (entry.index, entry.term))
    return msgspec.structs.replace(state, members=tuple(members))


def save(disk: Disk, directory: str, state: HardState, before: HardState) -> None:
    """Keep what has changed since `before`; it is on the device when this returns. For a thread. Raises
    OSError."""
    whole = before.suspect and not state.suspect
    if whole or state.members != before.members:
        replace_file(disk, os.path.join(directory, _FILE), msgspec.json.encode(_Kept(state.members)))
    if (state.term, state.vote) != (before.term, before.vote):
        write_term(disk, directory, TermAndVote(state.term, state.vote))
    if whole:
        forget_suspect(disk, directory)
