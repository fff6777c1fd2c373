"""A topic deletion beside a tick that cannot be written."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.store.kit import START_MS, bodies, open_store, put, send

from cometmq.store import ManualClock
from cometmq.testing.faulty_disk import FaultyDisk


async def test_a_new_topic_is_not_hidden_by_a_deletion_beside_a_failed_write(tmp_path: Path) -> None:
    """The deletion was noted for an end of the log that the failed write took back: what the new topic got
    below that end must not count as deleted at the next start."""
    disk = FaultyDisk(really_sync=False)
    store = open_store(tmp_path, disk, ManualClock(START_MS))
    send(store, b"old")
    send(store, b"other", topic="Other")
    store.start()
    put(store, b"x" * 5000, topic="Other")
    deletion = asyncio.create_task(store.deletion.delete(["T"]))
    await asyncio.sleep(0)
    disk.fail("pwrite", match="commitlog")
    assert store.commit().error is not None
    disk.heal()
    assert await deletion == 1
    send(store, b"new")
    store.writer.make_durable()
    store.crash()
    store = open_store(tmp_path, FaultyDisk(really_sync=False), ManualClock(START_MS))
    assert bodies(store.get_messages("T", 0, 0, 10)) == [b"new"]
    store.close()
