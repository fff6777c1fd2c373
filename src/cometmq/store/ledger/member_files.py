"""The small files of a raft member: `currterm`, its term and vote, `checkpoint`, how far its log is,
`suspect`, there while its log lacks entries that it once had, and `forgot` beside it where term and vote are
lost, too.

The first two are properties as DLedger 0.3.1 writes them (docs/reference/storage.md, DLedger files). Ours are
replaced in one step and are on the device when a call returns.
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
"""Ours alone; Apache's broker ignores it, and drops it with its next checkpoint."""
_SUSPECT, _FORGOT = "suspect", "forgot"
_LIMIT = 1 << 16  # bytes


class TermAndVote(NamedTuple):
    """A member's term (-1: none yet), and whom it has voted for in it ("": nobody)."""

    term: int = -1
    vote: str = ""


class RaftLogCheckpoint(NamedTuple):
    """Indexes of the last entry (end), of the last that was known to be committed, and of the last that was
    on the device; -1 for none, or where nobody says."""

    end: int = -1
    committed: int = -1
    synced: int = -1


def read_term(disk: Disk, directory: str) -> TermAndVote | None:
    """What `currterm` says; None without the file. Raises StoreError when it cannot be read: a member that
    has forgotten its vote might vote again."""
    path = os.path.join(directory, "currterm")
    found = _read(disk, path)
    if found is None:
        return None
    return TermAndVote(_number(found, _TERM, path, None), found.get(_VOTE, "").strip())


def write_term(disk: Disk, directory: str, state: TermAndVote) -> None:
    """Raises OSError. In any thread, one call at a time."""
    text = f"{_VOTE}={state.vote}\n{_TERM}={state.term}\n"
    replace_file(disk, os.path.join(directory, "currterm"), text.encode())


def read_mark(disk: Disk, directory: str) -> RaftLogCheckpoint:
    """What `checkpoint` says. Raises StoreError when it cannot be read."""
    path = os.path.join(directory, "checkpoint")
    found = _read(disk, path) or {}
    return RaftLogCheckpoint(*(_number(found, key, path, -1) for key in (_END, _COMMITTED, _SYNCED)))


def write_mark(disk: Disk, directory: str, mark: RaftLogCheckpoint) -> None:
    """Raises OSError. In any thread, one call at a time."""
    text = f"{_END}={mark.end}\n{_COMMITTED}={mark.committed}\n{_SYNCED}={mark.synced}\n"
    replace_file(disk, os.path.join(directory, "checkpoint"), text.encode())


def is_suspect(disk: Disk, directory: str) -> bool:
    """Whether the log may lack entries that others of the group count on."""
    return disk.facts(os.path.join(directory, _SUSPECT)) is not None


def write_suspect(disk: Disk, directory: str, why: str) -> None:
    """From now on it may. Raises OSError."""
    replace_file(disk, os.path.join(directory, _SUSPECT), why.encode())


def has_forgotten(disk: Disk, directory: str) -> bool:
    """Whether such a member has lost its term and vote, too."""
    return is_suspect(disk, directory) and disk.facts(os.path.join(directory, _FORGOT)) is not None


def write_forgotten(disk: Disk, directory: str, why: str) -> None:
    """From now on it has, and is suspect. Raises OSError."""
    replace_file(disk, os.path.join(directory, _FORGOT), why.encode())
    write_suspect(disk, directory, why)


def forget_suspect(disk: Disk, directory: str) -> None:
    """It is whole again. Raises OSError. In any thread."""
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
        raise StoreError(f"{key} is {text[:40]!r}, not an index or a term", path)
    return int(text)
