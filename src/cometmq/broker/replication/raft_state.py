"""What a raft member keeps beside its log: term and vote as DLedger does, and what only our members know.

`currterm` (docs/reference/storage.md, DLedger files) is for either broker. `members.json` is ours: the members
entries of the log, and whether the log has lost entries. Both are written before the log changes, so they may
name entries that never came to be; `load` leaves those out.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import msgspec

from cometmq.errors import ConfigError, StoreError
from cometmq.protocol.addresses import parse_address
from cometmq.raft import HardState, Members, MembersEntry
from cometmq.store import Disk, Ledger, TermAndVote, read_file, read_term, replace_file, write_term

_FILE = "members.json"
_LIMIT = 1 << 20  # bytes
_PEER = re.compile(r"([A-Za-z][A-Za-z0-9]{0,30})-(.+)").fullmatch
_NUMBERED = re.compile(r"[A-Za-z]+([0-9]{1,6})").fullmatch


class _Kept(msgspec.Struct):
    members: tuple[MembersEntry, ...]
    suspect: bool = False


class Peer(NamedTuple):
    """A member of dLegerPeers."""

    member: str
    addr: str


def peers_of(text: str) -> list[Peer]:
    """The members in dLegerPeers, `n0-host:port;n1-host:port`. Raises ConfigError."""
    peers = []
    for word in filter(None, (word.strip() for word in text.split(";"))):
        found = _PEER(word)
        if found is None or parse_address(found[2]) is None:
            raise ConfigError("dLegerPeers", word, "members like n0-host:port, several separated by ';'")
        peers.append(Peer(found[1], found[2]))
    if len({peer.member for peer in peers}) < len(peers):
        raise ConfigError("dLegerPeers", text, "members with different names")
    return peers


def broker_id_of(member: str) -> int:
    """The brokerId of a follower: the number in its name and one. Raises ConfigError."""
    found = _NUMBERED(member)
    if found is None:
        raise ConfigError("dLegerSelfId", member, "letters and a number, like n0")
    return int(found[1]) + 1


def load(disk: Disk, ledger: Ledger, voters: frozenset[str]) -> HardState:
    """What this member kept. voters: whom the group starts with. Raises StoreError, OSError."""
    kept = read_term(disk, ledger.directory) or TermAndVote()
    path = os.path.join(ledger.directory, _FILE)
    try:
        found = msgspec.json.decode(read_file(disk, path, _LIMIT), type=_Kept)
    except FileNotFoundError:
        found = _Kept((MembersEntry(-1, -1, Members(voters)),))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"cannot be read: {error}", path) from None
    members = [entry for entry in found.members if _is_in(entry, ledger)]
    return HardState(max(kept.term, 0), kept.vote, tuple(members), found.suspect or ledger.suspect)


def _is_in(entry: MembersEntry, ledger: Ledger) -> bool:
    """Whether the log has the entry, or begins behind it."""
    if entry.index < ledger.first:
        return True
    return entry.index <= ledger.last and ledger.term_of(entry.index) == entry.term


def save(disk: Disk, directory: str, state: HardState, before: HardState) -> None:
    """Keep what has changed since `before`; it is on the device when this returns. For a thread. Raises
    OSError."""
    if (state.members, state.suspect) != (before.members, before.suspect):
        data = msgspec.json.encode(_Kept(state.members, state.suspect))
        replace_file(disk, os.path.join(directory, _FILE), data)
    if (state.term, state.vote) != (before.term, before.vote):
        write_term(disk, directory, TermAndVote(state.term, state.vote))
