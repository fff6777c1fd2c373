"""The small files of a raft member.

`currterm` holds the member's term and vote, and `checkpoint` the state of its log. The file `suspect` exists
while the log lacks entries that it once had, and the file `forgot` if the member has also lost its term and
vote.

The first two are properties files in the form of DLedger 0.3.1 (docs/reference/storage.md, DLedger files). A
file is replaced in one step, and is synced to disk when the call returns.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from cometmq.errors import ConfigError, StoreError
from cometmq.settings import properties_of
from cometmq.store.base.disk import Disk, read_file, replace_file, unlink_any

_TERM, _VOTE = "currTerm", "voteLeader"
_END, _COMMITTED = "endIndex", "committedIndex"
_SYNCED = "syncedIndex"
"""The key of the last synced index in the file `checkpoint`. Only CometMQ uses it.

Apache's broker ignores the key, and drops it when it writes the file.
"""
_SUSPECT, _FORGOT = "suspect", "forgot"
_LIMIT = 1 << 16  # Maximum length, in bytes, of a member's small file


class TermAndVote(NamedTuple):
    """A member's term (-1: none yet), and the member that it voted for in that term ("": none)."""

    term: int = -1
    vote: str = ""


class RaftLogCheckpoint(NamedTuple):
    """The indexes of the last entry (`end`), the last committed entry, and the last synced entry.

    An index is -1 if there is no such entry or if the index is unknown.
    """

    end: int = -1
    committed: int = -1
    synced: int = -1


def read_term(disk: Disk, directory: str) -> TermAndVote | None:
    """Return the content of `currterm`, or None if it is missing. Raises StoreError if it cannot be read.

    Without the vote in the file, the member might vote twice in a term.
    """
    path = os.path.join(directory, "currterm")
    found = _read(disk, path)
    if found is None:
        return None
    return TermAndVote(_number(found, _TERM, path, None), found.get(_VOTE, "").strip())


def write_term(disk: Disk, directory: str, state: TermAndVote) -> None:
    """Write `currterm`. Raises OSError. Any thread may call it, but only one at a time."""
    text = f"{_VOTE}={state.vote}\n{_TERM}={state.term}\n"
    replace_file(disk, os.path.join(directory, "currterm"), text.encode())


def read_checkpoint(disk: Disk, directory: str) -> RaftLogCheckpoint:
    """Return the content of `checkpoint`. Raises StoreError if it cannot be read."""
    path = os.path.join(directory, "checkpoint")
    found = _read(disk, path) or {}
    return RaftLogCheckpoint(*(_number(found, key, path, -1) for key in (_END, _COMMITTED, _SYNCED)))


def write_checkpoint(disk: Disk, directory: str, checkpoint: RaftLogCheckpoint) -> None:
    """Write `checkpoint`. Raises OSError. Any thread may call it, but only one at a time."""
    text = f"{_END}={checkpoint.end}\n{_COMMITTED}={checkpoint.committed}\n{_SYNCED}={checkpoint.synced}\n"
    replace_file(disk, os.path.join(directory, "checkpoint"), text.encode())


def is_suspect(disk: Disk, directory: str) -> bool:
    """Return whether the log may lack entries that other members rely on."""
    return disk.facts(os.path.join(directory, _SUSPECT)) is not None


def write_suspect(disk: Disk, directory: str, why: str) -> None:
    """Record that the log may lack entries that other members rely on. Raises OSError."""
    replace_file(disk, os.path.join(directory, _SUSPECT), why.encode())


def has_forgotten(disk: Disk, directory: str) -> bool:
    """Return whether the member has lost its term and vote, besides entries of its log."""
    return is_suspect(disk, directory) and disk.facts(os.path.join(directory, _FORGOT)) is not None


def write_forgotten(disk: Disk, directory: str, why: str) -> None:
    """Record that the member may have lost entries of its log, and also its term and vote. Raises OSError."""
    replace_file(disk, os.path.join(directory, _FORGOT), why.encode())
    write_suspect(disk, directory, why)


def remove_suspect(disk: Disk, directory: str) -> None:
    """Record that the log is complete again. Raises OSError. Any thread may call it."""
    unlink_any(disk, os.path.join(directory, _FORGOT))
    unlink_any(disk, os.path.join(directory, _SUSPECT))
    disk.fsync_dir(directory)


def _read(disk: Disk, path: str) -> dict[str, str] | None:
    try:
        data = read_file(disk, path, _LIMIT)
    except FileNotFoundError:
        return None
    try:
        return properties_of(data, path)
    except (ConfigError, ValueError) as problem:
        raise StoreError(f"cannot be read: {problem}", path) from None


def _number(found: dict[str, str], key: str, path: str, default: int | None) -> int:
    text = found.get(key, "").strip()
    if not text and default is not None:
        return default
    if not text.lstrip("-").isdecimal() or not text.isascii() or not -1 <= int(text) < 1 << 62:
        raise StoreError(f"{key} is {text[:40]!r}, which is not an entry's index or a term", path)
    return int(text)
