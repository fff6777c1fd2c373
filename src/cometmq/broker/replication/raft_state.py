"""What a raft member keeps beside its log: term and vote as DLedger does, and what only our members know.

`currterm` (docs/reference/storage.md, DLedger files) is for either broker. `members.json` is ours: the
members entries of the log, and whether the log may have lost entries. Both are written before the log
changes, so they may name entries that never came to be; `load` leaves those out.

A member without any of this is a new one, or has lost its disk. Nobody can tell from here, so its log is
suspect.
"""

from __future__ import annotations

import os

import msgspec

from cometmq.errors import StoreError
from cometmq.raft import HardState, Members, MembersEntry
from cometmq.store import Disk, Ledger, TermAndVote, read_file, read_term, replace_file, write_term

_FILE = "members.json"
_LIMIT = 1 << 20  # bytes


class _Kept(msgspec.Struct):
    members: tuple[MembersEntry, ...] = ()  # none while the group has not begun for this member
    suspect: bool = False


def load(disk: Disk, ledger: Ledger, voters: frozenset[str]) -> HardState:
    """What this member kept. voters: whom the group starts with. Raises StoreError, OSError."""
    kept = read_term(disk, ledger.directory) or TermAndVote()
    path = os.path.join(ledger.directory, _FILE)
    try:
        found = msgspec.json.decode(read_file(disk, path, _LIMIT), type=_Kept)
    except FileNotFoundError:
        found = _Kept(suspect=ledger.last < 0 and kept == TermAndVote())
        if found.suspect:
            replace_file(disk, path, msgspec.json.encode(found))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"cannot be read: {error}", path) from None
    entries = found.members or (MembersEntry(-1, -1, Members(voters)),)
    members = tuple(entry for entry in entries if _is_in(entry, ledger))
    if len(members) < len(entries):  # else they would be back when the log no longer begins in front of them
        replace_file(disk, path, msgspec.json.encode(_Kept(members, found.suspect)))
    return HardState(max(kept.term, 0), kept.vote, members, found.suspect)


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
    if (state.members, state.suspect) != (before.members, before.suspect):
        data = msgspec.json.encode(_Kept(state.members, state.suspect))
        replace_file(disk, os.path.join(directory, _FILE), data)
    if (state.term, state.vote) != (before.term, before.vote):
        write_term(disk, directory, TermAndVote(state.term, state.vote))
