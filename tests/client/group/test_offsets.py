"""Tests of the offset table: updates, stored offsets, retries after a failure, first offsets of queues."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import pytest

from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.routes import ReadTarget
from cometmq.client.group import offsets as offsets_module
from cometmq.client.group.offsets import (
    OffsetStorageError,
    OffsetStore,
    OwnOffsets,
    RemoteOffsets,
    start_offset,
)
from cometmq.client.group.options import ConsumeFromWhere
from cometmq.errors import ConnectError
from cometmq.message import MessageQueue

Q0, Q1 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1)
QUEUES = [MessageQueue("T", "a", number) for number in range(100)]


class Backend:
    def __init__(self) -> None:
        self.stored: dict[MessageQueue, int] = {}
        self.written: list[dict[MessageQueue, int]] = []
        self.failing: set[MessageQueue] = set()

    async def read(self, queue: MessageQueue) -> int | None:
        return self.stored.get(queue)

    async def write(self, table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        self.written.append(dict(table))
        await asyncio.sleep(0)
        self.stored.update({queue: offset for queue, offset in table.items() if queue not in self.failing})
        return {queue: ConnectError("a:1", "refused") for queue in table if queue in self.failing}


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def offsets(backend: Backend) -> OffsetStore:
    return OffsetStore(backend.read, backend.write)


async def test_offsets_only_rise_unless_told_otherwise(offsets: OffsetStore) -> None:
    offsets.update(Q0, 5)
    offsets.update(Q0, 3)
    assert offsets.memory(Q0) == 5
    offsets.update(Q0, 3, increase_only=False)
    assert offsets.memory(Q0) == 3


async def test_memory_comes_before_the_store(offsets: OffsetStore, backend: Backend) -> None:
    backend.stored[Q0] = 9
    assert await offsets.committed(Q0) == 9
    offsets.update(Q0, 12)
    assert await offsets.committed(Q0) == 12
    assert await offsets.stored(Q0) == 9


async def test_only_what_changed_is_stored(offsets: OffsetStore, backend: Backend) -> None:
    offsets.update(Q0, 1)
    offsets.update(Q1, 2)
    await offsets.persist()
    await offsets.persist()
    offsets.update(Q1, 3)
    await offsets.persist()
    assert backend.written == [{Q0: 1, Q1: 2}, {Q1: 3}]


async def test_what_failed_stays_due(offsets: OffsetStore, backend: Backend) -> None:
    backend.failing = {Q0}
    offsets.update(Q0, 1)
    offsets.update(Q1, 2)
    with pytest.raises(ConnectError):
        await offsets.persist()
    backend.failing = set()
    await offsets.persist()
    assert backend.written == [{Q0: 1, Q1: 2}, {Q0: 1}]


async def test_an_offset_that_moves_while_it_is_stored_stays_due(
    offsets: OffsetStore, backend: Backend
) -> None:
    offsets.update(Q0, 1)
    storing = asyncio.create_task(offsets.persist())
    await asyncio.sleep(0)
    offsets.update(Q0, 2)
    await storing
    await offsets.persist()
    assert backend.written == [{Q0: 1}, {Q0: 2}]


async def test_a_released_queue_is_stored_and_forgotten(offsets: OffsetStore, backend: Backend) -> None:
    offsets.update(Q0, 1)
    offsets.update(Q1, 2)
    await offsets.release([Q0])
    assert backend.stored == {Q0: 1}
    assert offsets.memory(Q0) is None
    assert offsets.memory(Q1) == 2


async def test_a_queue_is_forgotten_even_if_it_cannot_be_stored(
    offsets: OffsetStore, backend: Backend
) -> None:
    backend.failing = {Q0}
    offsets.update(Q0, 1)
    await offsets.release([Q0])
    assert offsets.memory(Q0) is None
    await offsets.persist()
    assert len(backend.written) == 1


async def test_the_last_persist_stores_again_what_a_late_pull_replaced(backend: Backend) -> None:
    older, lost, gone = QUEUES[3], QUEUES[70], QUEUES[71]
    write, read = backend.write, backend.read

    async def write_then_late_pull(table: dict[MessageQueue, int]) -> dict[MessageQueue, Exception]:
        failures = await write(table)
        if len(backend.written) == 1:
            backend.stored[older] = 7
            del backend.stored[lost]
        return failures

    async def refuse_one(queue: MessageQueue) -> int | None:
        if queue is gone:
            raise ConnectError("a:1", "refused")
        return await read(queue)

    offsets = OffsetStore(refuse_one, write_then_late_pull)
    for number, queue in enumerate(QUEUES):
        offsets.update(queue, 10 + number)
    await offsets.persist_last()
    assert backend.written[1:] == [{older: 13, lost: 80}]
    assert backend.stored == {queue: 10 + number for number, queue in enumerate(QUEUES)}


class Shelf:
    """An offset storage as a user may implement it."""

    def __init__(self, found: object = None) -> None:
        self.found = found
        self.kept: dict[MessageQueue, int] = {}

    async def read(self, queue: MessageQueue) -> int | None:
        if isinstance(self.found, Exception):
            raise self.found
        return self.kept.get(queue, self.found)  # type: ignore[arg-type]

    async def write(self, table: Mapping[MessageQueue, int]) -> None:
        if isinstance(self.found, Exception):
            raise self.found
        self.kept.update(table)


async def test_a_storage_of_the_users_own_keeps_the_offsets() -> None:
    shelf = Shelf()
    own = OwnOffsets(shelf)
    offsets = OffsetStore(own.read, own.write)
    assert await offsets.stored(Q0) is None
    offsets.update(Q0, 7)
    await offsets.persist()
    assert shelf.kept == {Q0: 7}
    assert await offsets.stored(Q0) == 7


async def test_a_storage_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Shelf):
        async def read(self, queue: MessageQueue) -> int | None:
            await asyncio.Event().wait()
            raise AssertionError

        async def write(self, table: Mapping[MessageQueue, int]) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(offsets_module, "_STORAGE_S", 0.01)
    own = OwnOffsets(Hanging())
    with pytest.raises(OffsetStorageError, match="TimeoutError"):
        await own.read(Q0)
    assert isinstance((await own.write({Q0: 7}))[Q0], OffsetStorageError)


@pytest.mark.parametrize("found", [RuntimeError("locked"), "seven", -1, 1.5])
async def test_a_storage_that_fails_is_named_and_asked_again(found: object) -> None:
    shelf = Shelf(found)
    own = OwnOffsets(shelf)
    with pytest.raises(OffsetStorageError, match="Shelf"):
        await own.read(Q0)
    if isinstance(found, Exception):
        offsets = OffsetStore(own.read, own.write)
        offsets.update(Q0, 7)
        with pytest.raises(OffsetStorageError, match="locked"):
            await offsets.persist()
        shelf.found = None
        await offsets.persist()
        assert shelf.kept == {Q0: 7}


class TornBroker:
    """A broker with a race that Apache's has, too: concurrent first commits replace each other's table."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, int]] = {}
        self.under_way: defaultdict[str, int] = defaultdict(int)
        self.most = 0
        self.brokers = self

    async def find_addr(self, queue: MessageQueue) -> str:
        return "127.0.0.1:1"

    async def update_consumer_offset(self, addr: str, group: str, queue: MessageQueue, offset: int) -> None:
        table = self.tables.get(queue.topic)
        self.under_way[queue.topic] += 1
        self.most = max(self.most, self.under_way[queue.topic])
        await asyncio.sleep(0)
        self.under_way[queue.topic] -= 1
        if table is None:
            self.tables[queue.topic] = {queue.queue_id: offset}
        else:
            table[queue.queue_id] = offset


async def test_a_new_groups_first_commits_all_stay() -> None:
    broker = TornBroker()
    wanted = {MessageQueue(topic, "a", number): number + 1 for topic in "TUV" for number in range(100)}
    assert await RemoteOffsets(cast(ClientInstance, broker), "g").write(wanted) == {}
    assert broker.tables == {topic: {number: number + 1 for number in range(100)} for topic in "TUV"}
    assert broker.most > 1  # later commits are sent concurrently


LAST, FIRST, TIME = ConsumeFromWhere.LAST_OFFSET, ConsumeFromWhere.FIRST_OFFSET, ConsumeFromWhere.TIMESTAMP


class Bounds:
    """A client instance whose broker has one queue, which ends at offset 99; store times equal offsets."""

    def __init__(self) -> None:
        self.brokers = self.reads = self

    async def run(self, queue: MessageQueue, read: Callable[[ReadTarget], Awaitable[int]]) -> int:
        return await read(ReadTarget("127.0.0.1:1", False))

    async def max_offset(self, addr: str, queue: MessageQueue) -> int:
        return 99

    async def offset_by_time(self, addr: str, queue: MessageQueue, timestamp_ms: int) -> int:
        return timestamp_ms


@pytest.mark.parametrize(
    ("where", "stored", "topic", "expected"),
    [
        (LAST, 7, "T", 7),
        (LAST, 0, "T", 0),
        (FIRST, 7, "T", 7),
        (TIME, 7, "%RETRY%G", 7),
        (LAST, None, "T", 99),
        (LAST, None, "%RETRY%G", 0),
        (FIRST, None, "T", 0),
        (FIRST, None, "%RETRY%G", 0),
        (TIME, None, "T", 1234),
        (TIME, None, "%RETRY%G", 99),
    ],
)
async def test_where_a_queue_starts(
    where: ConsumeFromWhere, stored: int | None, topic: str, expected: int
) -> None:
    client = cast(ClientInstance, Bounds())
    assert await start_offset(client, MessageQueue(topic, "a", 0), stored, where, 1234) == expected
