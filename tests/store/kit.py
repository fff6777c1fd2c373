"""Helpers for the tests of the store: a small configuration and one-line sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.faulty_disk import FaultyDisk

from cometmq.protocol.record.one import iter_records
from cometmq.store import (
    Clock,
    Commit,
    Disk,
    ManualClock,
    MessageStore,
    NotInMemory,
    ObjectStore,
    ReadResult,
    StoreConfig,
    TickMessage,
    Unit,
)
from cometmq.store.inspect.verify import verify
from cometmq.store.reading.queue_reader import RecordFilter
from cometmq.store.writing.appender import BatchRecords

T = TypeVar("T")
HOST = b"\x7f\0\0\1\0\0\xc3\x50"
START_MS = 1_700_000_000_000
opened: list[MessageStore] = []
"""Stores that the current test opened; the fixture `stopped_at_the_end` stops those still open."""


def in_place(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, as in a store without a loop, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        outcome: T = end.value
        return outcome
    work.close()
    raise RuntimeError("the store has a loop: await this")


def small(root: Path | str, **changes: Any) -> StoreConfig:
    """Return a configuration: 64 KiB segments, 100 units per queue file, 100 index slots, 400 entries."""
    settings: dict[str, Any] = {
        "store_path_root_dir": str(root),
        "mapped_file_size_commit_log": 64 << 10,
        "mapped_file_size_consume_queue": 2000,
        "max_hash_slot_num": 100,
        "max_index_num": 400,
    }
    return StoreConfig(**{**settings, **changes})


def open_store(
    root: Path | str,
    disk: Disk | None = None,
    clock: Clock | None = None,
    objects: ObjectStore | None = None,
    **changes: Any,
) -> MessageStore:
    return open_configured(small(root, **changes), disk, clock or ManualClock(START_MS), objects)


def open_configured(
    config: StoreConfig,
    disk: Disk | None = None,
    clock: Clock | None = None,
    objects: ObjectStore | None = None,
) -> MessageStore:
    opened.append(MessageStore.open(config, disk, clock, objects))
    return opened[-1]


def quick(root: Path | str, clock: Clock | None = None, **changes: Any) -> MessageStore:
    """Create a store whose syncs take no time."""
    return open_store(root, FaultyDisk(really_sync=False), clock, **changes)


def started(
    root: Path | str, disk: Disk | None = None, clock: Clock | None = None, **changes: Any
) -> MessageStore:
    """Start a store with background tasks on the running loop."""
    store = open_store(root, disk, clock, **changes)
    store.start()
    return store


def restarted(store: MessageStore, *given: Any, **changes: Any) -> MessageStore:
    """Stop the store cleanly and start it again; `given` and `changes` are passed to the start."""
    store.close()
    return open_store(store.config.store_path_root_dir, *given, **changes)


def after_crash(store: MessageStore, *given: Any, **changes: Any) -> MessageStore:
    """Kill the store and start it again; `given` and `changes` are passed to the start."""
    store.crash()
    return open_store(store.config.store_path_root_dir, *given, **changes)


def put(
    store: MessageStore,
    body: bytes = b"hello",
    topic: str = "T",
    queue_id: int = 0,
    properties: bytes = b"",
    **more: Any,
) -> TickMessage:
    """Append a message without committing it."""
    settings: dict[str, Any] = {"born_timestamp_ms": START_MS, "born_host": HOST, **more}
    return store.appender.append(topic, queue_id, body, properties, **settings)


def put_batch(
    store: MessageStore, batch: bytes, topic: str = "T", queue_id: int = 0, properties: bytes = b""
) -> BatchRecords:
    """Append the messages of a batch without committing them."""
    given = {"born_timestamp_ms": START_MS, "born_host": HOST}
    return store.appender.append_batch(topic, queue_id, batch, properties, **given)


def send(
    store: MessageStore, body: bytes = b"hello", topic: str = "T", queue_id: int = 0, **more: Any
) -> TickMessage:
    """Append and commit one message."""
    appended = put(store, body, topic, queue_id, **more)
    committed(store.commit())
    return appended


def put_all(store: MessageStore, bodies: Iterable[bytes], *place: Any, **more: Any) -> None:
    """Append messages with these bodies and commit them together."""
    for body in bodies:
        put(store, body, *place, **more)
    committed(store.commit())


def send_all(store: MessageStore, bodies: Iterable[bytes], *place: Any, **more: Any) -> None:
    """Append messages with these bodies and commit each one separately."""
    for body in bodies:
        send(store, body, *place, **more)


def by_record(check: Callable[[bytes | bytearray, int], bool | None]) -> RecordFilter:
    """A filter that checks one record at a time, given the data and the index of the record."""

    def find_match(
        data: bytes | bytearray, start: int, units: Sequence[Unit], first: int, _stop: int
    ) -> tuple[int, bool | None]:
        passes = check(data, units[first][0] - start)
        return first + (passes is False), passes

    return find_match


def numbered(*given: int) -> list[bytes]:
    """Return the numbers of a range as bodies."""
    return [b"%d" % number for number in range(*given)]


def committed(commit: Commit) -> Commit:
    assert commit.error is None, commit.error
    return commit


def waiter(store: MessageStore) -> asyncio.Future[bool]:
    """Return a future with the result of the sync that covers all messages sent so far."""
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    store.flusher.wait_for(store.log.end, future.set_result)
    return future


async def flushed(store: MessageStore) -> bool:
    return await asyncio.wait_for(waiter(store), 20)


def bodies(answer: ReadResult) -> list[bytes]:
    return [bytes(message.body) for message in iter_records(b"".join(answer.buffers))]


async def pulled(store: MessageStore, topic: str, queue_id: int, offset: int, count: int = 32) -> ReadResult:
    """Read like a broker's pull: threads read the data that is not in memory."""
    try:
        return store.get_messages(topic, queue_id, offset, count)
    except NotInMemory as miss:
        return await store.executor.query(
            lambda reads: store.get_messages(topic, queue_id, offset, count, reads=reads), miss
        )


def by_key(
    store: MessageStore, topic: str, key: str, limit: int = 9, begin_ms: int = 0, end_ms: int = 1 << 60
) -> list[bytes]:
    """Return the records that the index finds."""
    return in_place(store.lookups.by_key(topic, key, limit, begin_ms, end_ms, 1 << 24))


def finds(store: MessageStore, numbers: Iterable[int], topic: str = "T") -> None:
    """Check that the index finds exactly one record for each key k<number>."""
    for number in numbers:
        assert len(by_key(store, topic, f"k{number}")) == 1, number


def check_sound(store: MessageStore) -> None:
    """Stop the store cleanly and check that `verify` reports nothing."""
    store.close()
    assert verify(store.config.store_path_root_dir, config=store.config).findings == []


def offset_by_time(
    store: MessageStore, topic: str, queue_id: int, timestamp_ms: int, mode: str | None = None
) -> int:
    return in_place(
        store.lookups.offset_by_time(store.queues.find_queue(topic, queue_id), timestamp_ms, mode)
    )


def delete_topic(store: MessageStore, topic: str) -> int:
    """Delete a topic of a store without an event loop."""
    return in_place(store.deletion.delete([topic]))


def run_retention(store: MessageStore) -> list[str]:
    """Run both retention cycles of a store without an event loop; return the deleted paths."""
    return in_place(store.retention.log_cycle()) + in_place(store.retention.derived_cycle())


def run_topic_retention(store: MessageStore) -> int:
    """Run the retention of single topics without an event loop; return the number of hidden messages."""
    return in_place(store.topic_retention.topic_cycle())


def drop_first_segment(store: MessageStore, *, derived: bool = True) -> None:
    """Delete the oldest segment as retention does; with `derived` also its queue units and index entries."""
    path = store.log.path_of(store.log.segments[0])
    store.disk.unlink(path)
    fd = store.log.forget_first()
    if fd >= 0:
        store.disk.close(fd)
    if derived:
        in_place(store.retention.correct_minimums())
        in_place(store.retention.derived_cycle())


def everything(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    """Return the bodies of a whole queue, pulled from its minimum offset to its end."""
    found: list[bytes] = []
    offset = store.min_offset(topic, queue_id)
    while offset < store.max_offset(topic, queue_id):
        answer = store.reader.get(store.queues.find_queue(topic, queue_id), offset, 32)
        found += bodies(answer)
        assert answer.next_begin_offset > offset
        offset = answer.next_begin_offset
    return found
