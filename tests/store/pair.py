"""The stores of a master and a slave: the master's log is copied to the slave, and both are compared."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.store.kit import committed, put

from cometmq.protocol.properties.values import stored_tags_code
from cometmq.protocol.record.layout import COMMITTED, PREPARED, ROLLBACK
from cometmq.store import MessageStore

KINDS = (0, 0, 0, PREPARED, COMMITTED, ROLLBACK)


def fill(master: MessageStore, sizes: Sequence[int]) -> list[int]:
    """Store records with these body sizes, of all transaction types, in four queues; return their ends."""
    ends = []
    for number, size in enumerate(sizes):
        text = b"KEYS\x01k%d\x02TAGS\x01t%d" % (number, number % 3)
        appended = put(
            master, b"%d:" % number + bytes(size), "TU"[number % 2], number % 3 % 2, text,
            sys_flag=KINDS[number % len(KINDS)], tags_code=stored_tags_code(text),
        )  # fmt: skip
        ends.append(appended.physical_offset + appended.size)
        if number % 5 == 0:
            committed(master.commit())
    committed(master.commit())
    return ends


def log_bytes(store: MessageStore, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of the log from `start` on, segment by segment."""
    for base in store.log.segments:
        data = Path(store.log.path_of(base)).read_bytes()[: store.log.end - base]
        skip = max(0, start - base)
        if skip < len(data):
            yield base + skip, data[skip:]


def feed(slave: MessageStore, master: MessageStore, cuts: Sequence[int] = (32768,), ticks: int = 3) -> None:
    """Copy the part of the master's log that the slave lacks, in parts of the lengths `cuts`, repeated.

    The slave commits after every `ticks` parts.
    """
    number = 0
    for base, data in log_bytes(master, slave.replica.end):
        at = 0
        while at < len(data):
            length = cuts[number % len(cuts)]
            slave.replica.append(base + at, data[at : at + length])
            at += length
            number += 1
            if number % ticks == 0:
                assert slave.replica.commit().error is None
    assert slave.replica.commit().error is None


def same(slave: MessageStore, master: MessageStore) -> None:
    """Stop both stores and check that their logs, queues and index have the same bytes."""
    for store in (slave, master):
        store.close()
    assert _files(slave) == _files(master)
    assert _index(slave) == _index(master)


def _files(store: MessageStore) -> dict[str, bytes]:
    """Return log and queue files, without files of zeros."""
    found = {}
    root = Path(store.config.root)
    for directory in ("commitlog", "consumequeue"):
        for path, _, names in os.walk(root / directory):
            for name in names:
                data = Path(path, name).read_bytes()
                if data.strip(b"\0"):
                    found[os.path.relpath(Path(path, name), root)] = data
    return found


def _index(store: MessageStore) -> list[bytes]:
    return [Path(file.path).read_bytes() for file in store.index.files]
