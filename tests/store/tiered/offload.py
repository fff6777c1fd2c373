"""A store whose sealed segments are in an object store in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.kit.faulty_disk import FaultyDisk
from tests.kit.object_store import MemoryObjects
from tests.store.kit import committed, in_place, open_store, put, run_retention

from cometmq.protocol.properties.values import java_hash
from cometmq.store import ManualClock, MessageStore

HOUR = 3_600_000
NOON = 1_700_000_000_000


def tiered(root: Path, objects: MemoryObjects, **changes: Any) -> MessageStore:
    """Open a store that keeps segments for an hour, and all of them in `objects`."""
    settings: dict[str, Any] = {"tiered_local_reserved_time": 1, "delete_when": "99", **changes}
    return open_store(root, FaultyDisk(really_sync=False), ManualClock(NOON), objects, **settings)


def fill(store: MessageStore, segments: int, size: int = 2000, topic: str = "T") -> None:
    """Send messages to the queues 0 and 1 of a topic until the log has `segments`.

    Each has a key, and a tag that names its offset.
    """
    number = sum(queue.max_offset for queue in store.queues)
    clock = store.flusher.clock
    assert isinstance(clock, ManualClock)
    while len(store.log.segments) < segments:
        clock.now_ms += 10
        body, tag = b"%d " % number + bytes(size), f"t{number // 2}"
        properties = b"KEYS\x01k%d\x02TAGS\x01%s" % (number, tag.encode())
        put(store, body, topic, number % 2, properties=properties, tags_code=java_hash(tag))
        committed(store.commit())
        number += 1
    assert store.writer.make_durable()


def age(store: MessageStore, hours: float = 2, segments: int = -1) -> None:
    """Set the modification times of all segments but the last to hours ago."""
    for base in store.log.segments[:segments]:
        at_s = (NOON - hours * HOUR) / 1000
        os.utime(store.log.path_of(base), (at_s, at_s))


def upload(store: MessageStore) -> None:
    assert store.tiered is not None
    in_place(store.tiered.cycle())


def offload(store: MessageStore) -> list[str]:
    """Upload all sealed segments, and delete the local files. Return the deleted paths."""
    age(store)
    upload(store)
    return run_retention(store)
