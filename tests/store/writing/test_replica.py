"""A slave's log: whatever way the master's bytes are cut, the store becomes the master's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.kit import committed, put, quick

from cometmq.protocol.properties.values import stored_tags_code
from cometmq.protocol.record.layout import COMMITTED, PREPARED, ROLLBACK
from cometmq.store import MessageStore

KINDS = (0, 0, 0, PREPARED, COMMITTED, ROLLBACK)


def fill(master: MessageStore, sizes: list[int]) -> None:
    """Records of these body sizes, in four queues, of all transaction types."""
    for number, size in enumerate(sizes):
        text = b"KEYS\x01k%d\x02TAGS\x01t%d" % (number, number % 3)
        put(master, b"%d:" % number + bytes(size), "TU"[number % 2], number % 3 % 2, text,
            sys_flag=KINDS[number % len(KINDS)], tags_code=stored_tags_code(text))  # fmt: skip
        if number % 5 == 0:
            committed(master.commit())
    committed(master.commit())


def log_bytes(store: MessageStore) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) of each segment."""
    for base in store.log.segments:
        data = Path(store.log.path_of(base)).read_bytes()
        yield base, data[: store.log.end - base]


def feed(slave: MessageStore, master: MessageStore, cuts: list[int], ticks: int = 3) -> None:
    """The master's log in pieces of these lengths, over and over; a commit after each `ticks` of them."""
    number = 0
    for base, data in log_bytes(master):
        at = 0
        while at < len(data):
            length = cuts[number % len(cuts)]
            slave.replica.append(base + at, data[at : at + length])
            at += length
            number += 1
            if number % ticks == 0:
                assert slave.replica.commit().error is None
    assert slave.replica.commit().error is None


def files(root: Path) -> dict[str, bytes]:
    """What queues and log hold, without files of zeros."""
    found = {}
    for directory in ("commitlog", "consumequeue"):
        for path, _, names in os.walk(root / directory):
            for name in names:
                data = Path(path, name).read_bytes()
                if data.strip(b"\0"):
                    found[os.path.relpath(Path(path, name), root)] = data
    return found


def index(store: MessageStore) -> list[bytes]:
    return [Path(file.path).read_bytes() for file in store.index.files]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20_000) | st.integers(0, 300), min_size=1, max_size=120),
    cuts=st.lists(st.integers(1, 40_000) | st.integers(1, 100), min_size=1, max_size=8),
    ticks=st.integers(1, 4),
)
def test_however_the_bytes_are_cut_the_slave_becomes_the_master(
    tmp_path_factory: object, sizes: list[int], cuts: list[int], ticks: int
) -> None:
    root = tmp_path_factory.mktemp("pair")  # type: ignore[attr-defined]
    master, slave = quick(root / "master"), quick(root / "slave", broker_role="SLAVE")
    fill(master, sizes)
    feed(slave, master, cuts, ticks)
    assert slave.replica.end == slave.replica.next == master.log.end
    for store in (master, slave):
        store.close()
    assert files(root / "slave") == files(root / "master")
    assert index(slave) == index(master)
