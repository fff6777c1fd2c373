"""Deduplication of sends to topics with the attribute `dedup.window.ms`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.broker.transactions.conftest import ROLLBACK, end, prepare
from tests.kit.brokers import Peer, copy_running, create, records, refused, running, take
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until
from tests.store.cold_disk import ColdDisk

from cometmq.broker.base.writer import FLUSH_DISK_TIMEOUT
from cometmq.broker.send.key_table import KeyTable
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader, QueueRequestHeader
from cometmq.protocol.properties.values import encode_properties
from cometmq.store import Appender, Clock, Disk, StoreRefused, TickMessage
from cometmq.store.reading.lookup import Lookup

BATCH = RequestCode.SEND_BATCH_MESSAGE
MINUTE_MS = 60_000
WINDOW = f"+dedup.window.ms={5 * MINUTE_MS}"


class ShiftedClock(Clock):
    """The clock of the machine, which tests set forward or back."""

    shift_ms = 0

    def time_ms(self) -> int:
        return super().time_ms() + self.shift_ms


async def attributes(peer: Peer, text: str, topic: str = "Orders") -> None:
    answer = await create(peer, topic, 4, 4, attributes=text)
    assert answer.code == 0, answer.remark


async def send(peer: Peer, key: str, **more: Any) -> Frame:
    properties = {"UNIQ_KEY": key, **more.pop("properties", {})}
    return await peer.send(properties=properties, **more)


def place(answer: Frame) -> tuple[str, str, str]:
    """Return message id, queue id and queue offset in the response to a successful send."""
    assert answer.code == 0, answer.remark
    assert answer.ext is not None
    return answer.ext["msgId"], answer.ext["queueId"], answer.ext["queueOffset"]


async def stored(peer: Peer, topic: str = "Orders") -> list[bytes]:
    """Return the bodies of all messages of a topic."""
    found = []
    for queue_id in range(4):
        answer = await peer.pull(topic, queue_id)
        found += [message.body for message in records(answer)] if answer.code == 0 else []
    return found


def table_of(broker: Any, topic: str = "Orders") -> KeyTable:
    return broker.parts.dedup.tables[topic]


@pytest.fixture
async def orders(peer):
    """A client, and the topic Orders with a window of five minutes."""
    await attributes(peer, WINDOW)
    return peer


# -- plain sends


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
async def test_a_duplicate_gets_the_first_answer_and_is_not_stored(orders, code):
    await send(orders, "other", queue_id=1)
    first = await send(orders, "K", queue_id=1, body=b"first", code=code)
    assert place(await send(orders, "K", queue_id=1, body=b"second", code=code)) == place(first)
    assert place(await send(orders, "K", queue_id=2, body=b"third")) == place(first)
    await send(orders, "K", oneway=True)
    assert await stored(orders) == [b"hello", b"first"]


async def test_the_sends_of_one_tick_are_stored_once(cluster, orders):
    answers = await asyncio.gather(*(send(orders, f"K{n % 3}", queue_id=n % 2) for n in range(60)))
    assert len({place(answer) for answer in answers}) == 3
    assert len(await stored(orders)) == 3
    assert table_of(cluster.broker).duplicates == 57


async def test_only_topics_with_a_window_leave_the_fast_path(cluster, orders):
    sends = cluster.broker.parts.sends
    for number in range(4):
        await send(orders, f"A{number}")
    assert len(sends.templates) == 0
    for number in range(4):
        await send(orders, f"A{number}", topic="Plain")
    assert len(sends.templates) == 1
    await attributes(orders, WINDOW, "Plain")
    for _ in range(2):
        await send(orders, "A9", topic="Plain")
    assert len(await stored(orders, "Plain")) == 5


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("KEYS", {"KEYS": "order-1 paid"}, {"KEYS": "order-1"}),
        ("order", {"order": "1"}, {"order": "2"}),
        ("order", {"order": "1" * 5_000}, {"order": "1" * 5_001}),
    ],
)
async def test_the_attribute_names_the_property_with_the_key(orders, name, one, two):
    await attributes(orders, f"+dedup.key={name}")
    first = await orders.send(properties={"UNIQ_KEY": "A", **one})
    assert place(await orders.send(properties={"UNIQ_KEY": "B", **one})) == place(first)
    await orders.send(properties={"UNIQ_KEY": "A", **two})
    for _ in range(2):
        await orders.send(properties={"UNIQ_KEY": "A"})  # without a key
    assert len(await stored(orders)) == 4


async def test_keys_belong_to_a_topic(orders):
    await attributes(orders, WINDOW, "Other")
    for topic in ("Orders", "Other", "Third"):
        for _ in range(2):
            await send(orders, "K", topic=topic)
    assert [len(await stored(orders, topic)) for topic in ("Orders", "Other", "Third")] == [1, 1, 2]


async def test_a_refused_message_is_not_remembered(orders):
    large = send(orders, "K", body=bytes(5 << 20))
    answers = await asyncio.gather(large, send(orders, "K", body=b"small"), send(orders, "K"))
    assert answers[0].code == ResponseCode.MESSAGE_ILLEGAL
    assert place(answers[1]) == place(answers[2])
    assert await stored(orders) == [b"small"]


async def test_a_message_whose_write_failed_is_not_remembered(tmp_path):
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk) as (_, peer):
        await attributes(peer, WINDOW)
        disk.fail("pwrite", match="commitlog")
        answers = await asyncio.gather(*(send(peer, "K") for _ in range(3)))
        assert {answer.code for answer in answers} == {ResponseCode.SYSTEM_ERROR}
        first = await send(peer, "K")
        assert place(await send(peer, "K")) == place(first)
        assert len(await stored(peer)) == 1


# -- durability


async def test_a_duplicate_waits_for_the_flush_of_the_first(tmp_path):
    disk, go_on = FaultyDisk(really_sync=False), threading.Event()
    patient = {"flushDiskType": "SYNC_FLUSH", "syncFlushTimeout": "90000"}
    async with running(tmp_path, disk, **patient) as (broker, peer):
        await attributes(peer, WINDOW)
        disk.before = lambda operation, _: operation == "fdatasync" and go_on.wait(90)
        try:
            first = asyncio.create_task(send(peer, "K"))
            await until(lambda: broker.parts.writer.waiting == 1)
            second = asyncio.create_task(send(peer, "K"))
            await until(lambda: broker.parts.writer.waiting == 2)
            assert not first.done()
            assert not second.done()
        finally:
            go_on.set()
        assert place(await first) == place(await second)


async def test_a_duplicate_gets_the_outcome_of_the_first(started):
    _, peer = await started(brokerRole="SYNC_MASTER")
    await attributes(peer, WINDOW)
    one, two = await send(peer, "K"), await send(peer, "K")
    assert one.code == two.code == ResponseCode.SLAVE_NOT_AVAILABLE > FLUSH_DISK_TIMEOUT
    assert two.ext == {**one.ext, "firstMsgId": "K"}


# -- window and attributes


async def test_keys_count_by_their_store_time_and_longer_after_the_clock_was_set_back(tmp_path):
    clock = ShiftedClock()
    async with running(tmp_path, clock=clock) as (broker, peer):
        await attributes(peer, WINDOW)
        first = place(await send(peer, "K"))
        clock.shift_ms = 4 * MINUTE_MS
        assert place(await send(peer, "K")) == first
        clock.shift_ms = -60 * MINUTE_MS
        assert place(await send(peer, "K")) == first
        clock.shift_ms = 6 * MINUTE_MS
        second = place(await send(peer, "K"))
        assert second != first
        assert place(await send(peer, "K")) == second
        assert len(table_of(broker)) == 1


async def test_changes_of_the_attributes_take_effect_at_once(orders):
    await send(orders, "K")
    await attributes(orders, "-dedup.window.ms")
    await send(orders, "K")
    await attributes(orders, WINDOW)
    await send(orders, "L", properties={"KEYS": "1"})
    await attributes(orders, "+dedup.key=KEYS")
    await send(orders, "M", properties={"KEYS": "2"})
    await send(orders, "N", properties={"KEYS": "2"})
    assert len(await stored(orders)) == 4


async def test_messages_before_the_attribute_count_once_the_log_was_read(cluster, peer):
    await create(peer, "Orders", 4, 4)
    first = place(await send(peer, "K"))
    await attributes(peer, WINDOW)
    await cluster.broker.parts.dedup.scanned()
    assert place(await send(peer, "K")) == first


async def test_one_scan_of_the_log_runs_at_a_time_and_serves_all_topics_that_wait(cluster, peer, monkeypatch):
    groups_since, scans, go_on = Lookup.groups_since, list[int](), threading.Event()

    def scan_slowly(lookups: Lookup, disk: Disk, since_ms: int) -> Any:
        scans.append(since_ms)
        assert go_on.wait(20)
        return groups_since(lookups, disk, since_ms)

    monkeypatch.setattr(Lookup, "groups_since", scan_slowly)
    for number in range(4):
        await create(peer, f"T{number}", 1, 1)
        await send(peer, "K", topic=f"T{number}")
        await attributes(peer, WINDOW, f"T{number}")
    go_on.set()
    await cluster.broker.parts.dedup.scanned()
    assert len(scans) == 2
    for number in range(4):
        await send(peer, "K", topic=f"T{number}")
        assert len(records(await peer.pull(f"T{number}"))) == 1


async def test_a_longer_window_reaches_back_at_once(tmp_path):
    clock = ShiftedClock()
    async with running(tmp_path, clock=clock) as (broker, peer):
        await attributes(peer, "+dedup.window.ms=1000")
        first = place(await send(peer, "K"))
        clock.shift_ms = MINUTE_MS
        await send(peer, "L")
        assert len(table_of(broker)) == 1
        await attributes(peer, WINDOW)
        await broker.parts.dedup.scanned()
        assert place(await send(peer, "K")) == first


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("+dedup.window.ms=0", "milliseconds from 1 to 86400000"),
        ("+dedup.window.ms=86400001", "milliseconds from 1 to 86400000"),
        ("+dedup.window.ms=5m", "milliseconds from 1"),
        ("+dedup.key=TAGS", "UNIQ_KEY, KEYS, or the name of a user property"),
        ("+dedup.key=a\x01b", "UNIQ_KEY, KEYS, or the name of a user property"),
        ("+dedup.key=" + "a" * 128, "UNIQ_KEY, KEYS, or the name of a user property"),
        (f"{WINDOW},+message.type=LITE", "no attribute of a topic of type LITE"),
    ],
)
async def test_invalid_attributes_are_refused(peer, text, words):
    refused(await create(peer, "Orders", attributes=text), 1, words)


async def test_with_tiered_storage_a_window_is_as_long_as_the_log_stays_on_the_disk(started, tmp_path):
    """A start reads the keys from the local log, so it would not know those of segments that have left it."""
    store = {"tieredStoreUri": f"file://{tmp_path}/objects", "tieredReservedTime": "100"}
    _, peer = await started(**store, tieredLocalReservedTime="1")
    await attributes(peer, "+dedup.window.ms=3600000")
    refused(await create(peer, "Orders", attributes="+dedup.window.ms=3600001"), 1, "from 1 to 3600000")
    await attributes(peer, "+retention.ms=360000000")
    refused(await create(peer, "Orders", attributes="+retention.ms=360000001"), 1, "tieredReservedTime=100")


async def test_keys_of_a_deleted_topic_are_forgotten(cluster, orders):
    await send(orders, "K", body=b"old")
    assert (await orders.delete_topic("Orders")).code == 0
    await attributes(orders, WINDOW)
    await cluster.broker.parts.dedup.scanned()
    await send(orders, "K", body=b"new")
    assert await stored(orders) == [b"new"]


# -- restarts


@pytest.mark.parametrize("killed", [False, True])
async def test_keys_are_known_after_a_restart(tmp_path, killed):
    async with running(tmp_path / "one") as (_, peer):
        await attributes(peer, WINDOW)
        sent = [place(await send(peer, f"K{n}", body=bytes(3_000))) for n in range(200)]
        sent.append(place(await send(peer, "D", properties={"DELAY": "10"})))
        if killed:
            copy_running(tmp_path / "one", tmp_path / "two")
    async with running(tmp_path / ("two" if killed else "one")) as (broker, peer):
        again = [place(await send(peer, f"K{n}")) for n in range(200)]
        again.append(place(await send(peer, "D", properties={"DELAY": "10"})))
        # The message ids contain the port, which differs between the runs: those of the records count.
        assert again == sent
        assert table_of(broker).duplicates == 201


async def test_only_the_segments_of_the_window_are_read(tmp_path, monkeypatch):
    clock = ShiftedClock()
    small = {"mappedFileSizeCommitLog": str(64 << 10)}
    async with running(tmp_path, clock=clock, **small) as (_, peer):
        await attributes(peer, WINDOW)
        for hour in range(3):
            clock.shift_ms = hour * 60 * MINUTE_MS
            for number in range(20):
                await send(peer, f"{hour}-{number}", body=bytes(10_000))
    found = []
    monkeypatch.setattr(KeyTable, "put", lambda _self, key, *_: found.append(key))
    async with running(tmp_path, clock=clock, **small):
        assert 20 <= len(found) < 30
    assert {b"2-%d" % number for number in range(20)} <= set(found)


async def test_a_record_that_must_be_read_from_the_disk_delays_only_its_duplicate(tmp_path):
    async with running(tmp_path) as (_, peer):
        await attributes(peer, WINDOW)
        first = [place(await send(peer, f"K{n}")) for n in range(2)]
    disk = ColdDisk()
    async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (_, peer):
        disk.cold = True
        disk.go_on.clear()
        duplicate = asyncio.create_task(send(peer, "K0"))
        batch = asyncio.create_task(
            peer.send(body=encode_batch([item("K0"), item("K1"), item("new")]), code=BATCH, batch=True)
        )
        assert await asyncio.to_thread(disk.waiting.wait, 20)
        assert (await send(peer, "other")).code == 0
        assert not duplicate.done()
        disk.go_on.set()
        assert place(await duplicate) == first[0]
        assert place(await batch)[0].split(",")[:2] == [msg_id for msg_id, _, _ in first]
        assert disk.in_the_loop == 0


# -- batches


def item(key: str, body: bytes = b"in a batch") -> tuple[int, bytes, bytes]:
    return 0, body, encode_properties({"UNIQ_KEY": key} if key else {"TAGS": "t"})


@pytest.mark.parametrize("version", [409, 513])
async def test_of_a_batch_only_the_new_messages_are_stored(orders, version):
    single = place(await send(orders, "B", queue_id=2, body=b"alone"))
    batch = {"code": BATCH, "batch": True, "version": version, "properties": {"UNIQ_KEY": "OF-THE-BATCH"}}
    body = encode_batch([item("A", b"a"), item("B"), item("C", b"c"), item("A"), item("", b"-")])
    ids, queue_id, offset = place(await orders.send(body=body, **batch))
    found = records(await orders.pull())
    assert [message.body for message in found] == [b"a", b"c", b"-"]
    a, c, without = (message.offset_msg_id for message in found)
    assert (ids.split(","), queue_id, offset) == ([a, single[0], c, a, without], "0", "0")

    body = encode_batch([item("B"), item("C"), item("A")])  # nothing new
    assert place(await orders.send(body=body, queue_id=1, **batch)) == (f"{single[0]},{c},{a}", "2", "0")
    assert place(await send(orders, "C")) == (c, "0", "1")
    assert len(await stored(orders)) == 4


async def test_an_invalid_batch_is_refused_as_before(orders):
    body = encode_batch([item("A"), item("B")])
    assert (await orders.send(body=body[:-3], code=BATCH, batch=True)).code == 13
    large = encode_batch([item("A"), item("B", bytes(5 << 20))])
    assert (await orders.send(body=large, code=BATCH, batch=True)).code == 13
    assert (await send(orders, "A", body=b"new")).code == 0
    assert await stored(orders) == [b"new"]


# -- delayed, transactional and consumed messages


@pytest.mark.parametrize("delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "300"}])
async def test_a_delayed_message_counts_from_its_send_and_is_delivered_once(fast, tmp_path, delay):
    peer = fast.peer()
    await attributes(peer, WINDOW)
    answers = [await send(peer, "K", queue_id=3, properties=delay) for _ in range(2)]
    answers.append(await send(peer, "K", queue_id=3))  # not delayed
    assert len({place(answer) for answer in answers}) == 1
    assert len({(answer.ext or {}).get("recallHandle") for answer in answers}) == 1
    assert ("recallHandle" in (answers[0].ext or {})) == ("TIMER_DELAY_MS" in delay)
    await until_stored(peer, 1)
    assert place(await send(peer, "K")) == place(answers[0])
    copy_running(fast.broker.config.store.root, tmp_path / "copy")
    async with running(tmp_path / "copy") as (_, other):
        assert place(await send(other, "K")) == place(answers[0])
        assert len(await stored(other)) == 1


async def until_stored(peer: Peer, count: int) -> None:
    async with asyncio.timeout(20):
        while len(await stored(peer)) < count:
            await asyncio.sleep(0.05)


async def test_transactional_messages_count_from_their_commit_on(cluster, orders):
    halves = [await prepare(orders, key="K", body=b"half %d" % n) for n in range(4)]
    assert (await end(orders, halves[0], ROLLBACK)).code == 0
    first, second = await asyncio.gather(end(orders, halves[1]), end(orders, halves[2]))
    assert (first.code, second.code, (await end(orders, halves[3])).code) == (0, 0, 0)
    assert await stored(orders) == [b"half 1"]
    (message,) = records(await orders.pull())
    assert place(await send(orders, "K"))[0] == message.offset_msg_id
    ledger = cluster.broker.parts.transactions.ledger
    assert ledger.count_open(4) == 0
    assert (await end(orders, halves[2])).code == ResponseCode.SYSTEM_ERROR  # it has ended


async def test_a_commit_that_fails_does_not_end_the_transactions_of_its_duplicates(
    cluster, orders, monkeypatch
):
    one, two = [await prepare(orders, key="K", body=b"half %d" % n) for n in range(2)]
    append_all = Appender.append_all

    def refuse_the_first(appender: Appender, messages: list[TickMessage], *limits: Any) -> Any:
        if not messages or messages[0].queue.topic != "Orders":
            return append_all(appender, messages, *limits)
        refused = append_all(appender, messages[1:], *limits)
        return {0: StoreRefused(1, "no"), **{number + 1: why for number, why in refused.items()}}

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append_all", refuse_the_first)
        answers = await asyncio.gather(end(orders, one), end(orders, two))
    assert all(answer.code != 0 for answer in answers)
    assert await stored(orders) == []
    assert [(await end(orders, half)).code for half in (two, one)] == [0, 0]
    assert await stored(orders) == [b"half 1"]


async def test_a_commit_waits_for_the_record_with_its_key_and_nothing_else_does(tmp_path):
    async with running(tmp_path) as (_, peer):
        await attributes(peer, WINDOW)
        await send(peer, "K")
    disk = ColdDisk()
    async with running(tmp_path, disk, accessMessageInMemoryMaxRatio="0") as (_, peer):
        half = await prepare(peer, key="K")
        disk.cold = True
        disk.go_on.clear()
        commit = asyncio.create_task(end(peer, half))
        assert await asyncio.to_thread(disk.waiting.wait, 20)
        assert (await send(peer, "other")).code == 0
        assert not commit.done()
        disk.go_on.set()
        assert (await commit).code == 0
        disk.cold = False
        assert len(await stored(peer)) == 2


async def test_a_transaction_of_a_message_that_was_sent_otherwise_only_ends(orders, tmp_path, cluster):
    await send(orders, "K", body=b"plain")
    assert (await end(orders, await prepare(orders, key="K"))).code == 0
    assert await stored(orders) == [b"plain"]
    assert (await end(orders, await prepare(orders, key="L", body=b"committed"))).code == 0
    copy_running(cluster.broker.config.store.root, tmp_path / "copy")
    async with running(tmp_path / "copy") as (_, peer):
        await send(peer, "L")
        assert (await end(peer, await prepare(peer, key="K"))).code == 0
        assert await stored(peer) == [b"plain", b"committed"]


async def test_retries_of_consumers_are_never_duplicates(orders):
    await send(orders, "K")
    (message,) = records(await orders.pull())
    for _ in range(2):
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset, group="G", delay_level=-1, origin_topic="Orders"
        )
        assert (await orders.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)).code == 0
        properties = {"RETRY_TOPIC": "Orders"}
        assert (await send(orders, "K", topic="%RETRY%G", properties=properties)).code == 0
    assert len(await take(orders, "%DLQ%G", 2)) == 2
    answer = await orders.call(RequestCode.GET_MAX_OFFSET, QueueRequestHeader(topic="%RETRY%G", queue_id=0))
    assert answer.ext["offset"] == "2"


# -- bounds and metrics


async def test_beyond_its_limits_a_table_forgets_the_oldest_keys_and_counts_them(started, caplog):
    cluster, peer = await started(dedupMaxKeysPerTopic="10", dedupMaxKeys="64")
    await attributes(peer, WINDOW)
    await asyncio.gather(*(send(peer, f"K{n}") for n in range(25)))
    table = table_of(cluster.broker)
    assert (len(table), table.forgotten) == (10, 15)
    assert "dedupMaxKeysPerTopic=10" in caplog.text
    await send(peer, "K24")
    await send(peer, "K0")
    assert len(await stored(peer)) == 26


async def test_the_limit_of_all_topics_takes_from_the_largest(started):
    cluster, peer = await started(dedupMaxKeys="100")
    await attributes(peer, WINDOW)
    await attributes(peer, WINDOW, "Small")
    await asyncio.gather(*(send(peer, f"K{n}", topic="Small") for n in range(20)))
    await asyncio.gather(*(send(peer, f"K{n}") for n in range(400)))
    assert len(table_of(cluster.broker, "Small")) == 20
    assert 80 <= len(table_of(cluster.broker)) < 80 + 64


async def test_a_lower_limit_of_all_topics_takes_from_as_many_as_needed(started):
    cluster, peer = await started()
    topics = [f"T{n}" for n in range(5)]
    for topic in topics:
        await attributes(peer, WINDOW, topic)
        await asyncio.gather(*(send(peer, f"K{n}", topic=topic) for n in range(40)))
    change = await peer.call(RequestCode.UPDATE_BROKER_CONFIG, body=b"dedupMaxKeys=70")
    assert change.code == 0
    answers = await asyncio.gather(*(send(peer, f"L{n}", topic="T0") for n in range(64)))
    assert {answer.code for answer in answers} == {0}
    assert 70 <= sum(map(len, cluster.broker.parts.dedup.tables.values())) < 70 + 64


async def test_the_limit_of_all_topics_holds_for_what_a_start_finds_in_the_log(tmp_path):
    topics = [f"T{n}" for n in range(5)]
    async with running(tmp_path) as (_, peer):
        for topic in topics:
            await attributes(peer, WINDOW, topic)
            await asyncio.gather(*(send(peer, f"K{n}", topic=topic) for n in range(40)))
    async with running(tmp_path, dedupMaxKeys="70") as (broker, _):
        assert sum(map(len, broker.parts.dedup.tables.values())) == 70


async def test_the_metrics_count_duplicates_and_keys(cluster, orders):
    for key in ("A", "B", "B"):
        await send(orders, key)
    families = await asyncio.to_thread(cluster.broker.parts.metrics.families)
    found = {name: family.samples for name, family in families.table.items() if "_dedup_" in name}
    labels = ("DefaultCluster", "broker", "broker-a", "Orders")
    assert found == {
        "cometmq_dedup_duplicates": [(labels, 1)],
        "cometmq_dedup_forgotten_keys": [(labels, 0)],
        "cometmq_dedup_keys": [(labels, 2)],
    }


class TestKeyTable:
    def test_the_first_of_several_values_counts(self):
        table = KeyTable("T", b"K", 1_000)
        assert table.key_of(b"XK\x01x\x02K\x01one\x02K\x01two") == b"one"
        assert table.key_of(b"K\x01one") == b"one"
        assert table.key_of(b"XK\x01x\x02KX\x01y") == b""

    def test_long_keys_take_bounded_memory_and_are_told_apart(self):
        table = KeyTable("T", b"K", 1_000)
        one, two = (table.key_of(b"K\x01" + bytes((65,)) * length) for length in (10_000, 10_001))
        assert len(one) == len(two) == 64
        assert one != two

    def test_expired_keys_are_removed_as_new_ones_arrive(self):
        table = KeyTable("T", b"K", 1_000)
        table.older[b"old"] = (0, 0)
        for number in range(100):
            table.put(b"%d" % number, number, number * 100, number * 100, 1_000)
        assert len(table) == 11
        assert table.find(b"89", 9_900) == 89
        assert table.find(b"88", 9_900) is None
        assert table.forgotten == 0

    def test_a_key_moves_behind_the_others_when_it_is_stored_again(self):
        table = KeyTable("T", b"K", 1_000)
        for position, key in enumerate((b"a", b"b", b"a", b"c")):
            table.put(key, position, 0, 0, 2)
        assert [*table.keys] == [b"a", b"c"]
