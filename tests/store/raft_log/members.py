"""Stores of raft members that tests control directly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import bodies, committed, open_store, put

from cometmq.store import Disk, MessageStore
from cometmq.store.raft_log.raft_log import RaftLog

ALL = 1 << 62


def member(root: Path | str, disk: Disk | None = None, name: str = "n0", **changes: Any) -> MessageStore:
    """Open a member of the group g with 64 KiB segments."""
    settings = {"enable_d_leger_commit_log": True, "d_leger_group": "g", "d_leger_self_id": name}
    return open_store(root, disk or FaultyDisk(really_sync=False), **{**settings, **changes})


def again(store: MessageStore, *, clean: bool = True, **changes: Any) -> MessageStore:
    """Restart the member after a clean stop or a kill."""
    (store.close if clean else store.crash)()
    config = store.config.replace(**changes)
    name = config.d_leger_self_id
    kept = {"flush_disk_type": config.flush_disk_type, "d_leger_peers": config.d_leger_peers}
    return member(config.root, name=name, **kept)


def raft_log(store: MessageStore) -> RaftLog:
    assert store.raft_log is not None
    return store.raft_log


def elect(store: MessageStore, term: int) -> int:
    """Make the member the leader, as its group would; return the index of its first entry."""
    log = raft_log(store)
    log.lead(term)
    index = log.append_own(b"{}")
    committed(store.commit())
    log.commit_to(index)
    log.take_messages()
    return index


def leader(root: Path | str, term: int = 1, **more: Any) -> MessageStore:
    store = member(root, **more)
    elect(store, term)
    return store


def add(store: MessageStore, *given: bytes, topic: str = "T", **more: Any) -> None:
    """Append entries with these bodies in one tick, without committing them."""
    for body in given:
        put(store, body, topic, **more)
    committed(store.commit())


def agree(store: MessageStore) -> None:
    """Commit all of the member's entries."""
    raft_log(store).commit_to(raft_log(store).last)


def hand_over(source: MessageStore, target: MessageStore, most: int = 1 << 20, stop: int = ALL) -> None:
    """Copy the entries before `stop` that the target lacks, in parts of at most `most` bytes."""
    give, take = raft_log(source), raft_log(target)
    while take.last < min(give.last, stop - 1):
        entries = give.range(take.last + 1, min(stop, give.last + 1), most)
        take.append(bytes(give.read(entries)))
        committed(target.commit())


def seen(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    """Return the bodies that readers receive."""
    found: list[bytes] = []
    offset = store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        got = store.get_messages(topic, queue_id, offset, 32)
        found += bodies(got)
        offset = got.next_begin_offset
    return found
