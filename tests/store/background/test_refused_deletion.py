"""A topic whose deletion the disk refuses stays usable: messages sent to it afterwards are served."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.kit.faulty_disk import FaultyDisk
from tests.store.kit import committed, delete_topic, everything, in_place, numbered, open_store, put, send

from cometmq.store import MessageStore

SENT = 250  # messages, in three files of each queue


def filled(root: Path, disk: FaultyDisk) -> MessageStore:
    store = open_store(root, disk)
    for n in range(SENT):
        for queue_id in (0, 1):
            put(store, b"%d" % n, queue_id=queue_id)
        put(store, b"%d" % n, topic="Other")
    committed(store.commit())
    store.writer.make_durable()
    in_place(store.topic_retention.raise_min_offsets("T", {0: 3}))
    return store


def serves(store: MessageStore, *after: bytes) -> None:
    assert store.max_offset("T", 0) == SENT + len(after)
    assert everything(store)[-len(after) :] == list(after)
    assert everything(store, "Other") == numbered(SENT)
    left = everything(store, queue_id=1)
    assert left == numbered(SENT)[SENT - len(left) :]


@pytest.mark.parametrize("unclean", [False, True])
def test_wherever_it_is_refused_the_topic_goes_on(tmp_path: Path, unclean: bool) -> None:
    refused = 0
    for number in range(1, 60):
        root, disk = tmp_path / f"{number}", FaultyDisk(really_sync=False)
        store = filled(root, disk)
        fault = disk.fail("*", first=number, error=errno.ENOSPC)
        try:
            assert delete_topic(store, "T") == 2
        except OSError:
            refused += 1
            disk.heal()
            assert send(store, b"after").queue_offset == SENT
            serves(store, b"after")
            if unclean:
                store.writer.make_durable()
                store.crash()
            else:
                store.close()
            store = open_store(root, disk)
            assert send(store, b"more").queue_offset == SENT + 1
            serves(store, b"after", b"more")
            assert delete_topic(store, "T") == 2
        untouched = fault.times
        disk.heal()
        assert "T" not in store.queues.topics()
        assert send(store, b"new").queue_offset == 0
        assert everything(store) == [b"new"]
        store.close()
        if untouched:
            break
    else:
        pytest.fail("the deletion has more operations than were tried")
    assert refused > 15
