"""Delayed messages: delivery times, and the handling of messages that cannot be delivered."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.broker.timers.kit import move_all, short_retention
from tests.kit.brokers import records, running, store_raw, take
from tests.kit.faulty_disk import FaultyDisk
from tests.kit.waiting import until

from cometmq.broker.base.delay_levels import STEP_MS, DelayLevels
from cometmq.broker.base.times import mono_ms
from cometmq.broker.tables.delay_offsets import DelayOffsets
from cometmq.broker.timers.delivered import delivered, goes_on
from cometmq.broker.timers.schedule import ScheduleService
from cometmq.protocol.bodies import DelayOffsetTable
from cometmq.protocol.codes import SCHEDULE_TOPIC, UNSENDABLE_TOPICS, RequestCode
from cometmq.protocol.headers import ConsumerSendMsgBackRequestHeader
from cometmq.protocol.record.one import iter_records, properties_of
from cometmq.store import FILLER_SIZE, UNIT_DTYPE
from cometmq.store.base.clock import Clock, ManualClock


@pytest.fixture
async def peer(fast):
    return fast.peer()


class TestDelays:
    async def test_a_delayed_message_comes_after_its_time_and_not_before(self, peer):
        await peer.send()
        begun = time.monotonic()
        answer = await peer.send(body=b"later", properties={"DELAY": "4", "TAGS": "TagA", "KEYS": "k"})
        assert answer.ext["queueId"] == "0"  # the id of the final queue, not of the delay queue
        _, message = await take(peer, "Orders", 2)
        assert 0.4 <= time.monotonic() - begun < 30.0
        assert (message.body, message.queue_id, message.queue_offset) == (b"later", 0, 1)
        waited = {"DELAY": "4", "REAL_TOPIC": "Orders", "REAL_QID": "0"}
        assert message.properties == {"TAGS": "TagA", "KEYS": "k", "CLUSTER": "DefaultCluster", **waited}
        assert len(records(await peer.pull(offset=1, expression="TagA"))) == 1

    async def test_while_it_waits_its_entry_carries_the_delivery_time(self, fast, peer):
        await peer.send(properties={"DELAY": "4"})
        (waiting,) = records(await peer.pull("SCHEDULE_TOPIC_XXXX", 3))
        store = fast.broker.parts.store
        entry = store.queues.find_queue("SCHEDULE_TOPIC_XXXX", 3).unit(0)
        assert entry[2] == waiting.store_timestamp_ms + 400

    async def test_a_level_above_the_last_is_lowered_to_it(self, peer):
        await peer.send(properties={"DELAY": "99"})
        assert len(records(await peer.pull("SCHEDULE_TOPIC_XXXX", 5))) == 1
        (message,) = await take(peer, "Orders", 1)
        assert message.properties["DELAY"] == "6"

    @pytest.mark.parametrize("level", ["0", "-1"])
    async def test_no_delay(self, peer, level):
        await peer.send(body=b"now", properties={"DELAY": level})
        assert [m.body for m in records(await peer.pull())] == [b"now"]

    async def test_a_level_that_is_no_number_is_illegal(self, fast):
        assert (await fast.peer().send(properties={"DELAY": "soon"})).code == 13

    async def test_many_of_one_level_keep_their_order(self, peer):
        await asyncio.gather(*(peer.send(body=b"%d" % n, properties={"DELAY": "1"}) for n in range(150)))
        assert [m.body for m in await take(peer, "Orders", 150)] == [b"%d" % n for n in range(150)]

    async def test_what_waits_survives_a_restart_and_comes_once(self, fast, peer):
        await peer.send(body=b"early", properties={"DELAY": "1"})
        await take(peer, "Orders", 1)
        await peer.send(body=b"late", properties={"DELAY": "4"})
        await fast.restart()
        peer = fast.peer()
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"early", b"late"]
        answer = await peer.call(RequestCode.GET_ALL_DELAY_OFFSET)
        assert DelayOffsetTable.decode(answer.body).offset_table == {1: 1, 4: 1}
        await asyncio.sleep(0.3)
        assert (await peer.pull()).ext["maxOffset"] == "2"


class TestAfterAKill:
    """The offset file is older than the log: a message whose copy is in the log is not delivered again."""

    @pytest.mark.parametrize(
        "file", [None, {}, {1: 1}, {1: 2, 4: 1}], ids=["lost", "empty", "older", "other"]
    )
    async def test_what_was_delivered_comes_once(self, fast, peer, tmp_path, file):
        await peer.send(body=b"0", properties={"DELAY": "1"})
        store_delayed(fast, b"", b"undeliverable")
        for level, count in (("4", 2), ("1", 3)):
            for _ in range(count):
                await peer.send(body=level.encode(), properties={"DELAY": level})
        await take(peer, "Orders", 6)
        for _ in range(2):
            await peer.send(body=b"late", properties={"DELAY": "4"})
        await fast.close_peers()
        store = fast.broker.config.store.root
        await fast.standalone.stop()
        for path in Path(store, "config").glob("delayOffset.json*"):
            path.unlink()
        if file is not None:
            Path(store, "config", "delayOffset.json").write_text(json.dumps({"offsetTable": file}))
        await fast.standalone.start()
        peer = fast.peer()
        bodies = [message.body for message in await take(peer, "Orders", 8)]
        assert bodies.count(b"late") == 2 == bodies.count(b"4")
        assert bodies.count(b"1") == 3
        await peer.send(body=b"end", properties={"DELAY": "1"})
        assert (await take(peer, "Orders", 9))[-1].body == b"end"

    async def test_what_waits_beside_a_level_that_was_delivered_is_not_passed_over(
        self, fast, peer, monkeypatch
    ):
        monkeypatch.setattr("cometmq.broker.timers.delivered._UNITS_AT_ONCE", 2)
        for number in range(6):
            await peer.send(body=b"%d" % number, properties={"DELAY": "4"})
        await peer.send(body=b"first", properties={"DELAY": "1"})
        await take(peer, "Orders", 1)
        await fast.close_peers()
        path = Path(fast.broker.config.store.root, "config", "delayOffset.json")
        await fast.standalone.stop()
        path.unlink()
        await fast.standalone.start()
        found = await take(fast.peer(), "Orders", 7)
        assert [m.body for m in found] == [b"first", *(b"%d" % n for n in range(6))]

    async def test_the_file_says_from_where_on_the_log_is_read(self, fast, peer):
        for _ in range(2):
            await peer.send(properties={"DELAY": "1"})
        await take(peer, "Orders", 2)
        await fast.close_peers()
        delays = fast.broker.parts.tables.delays
        end = fast.broker.parts.store.log.end
        await fast.standalone.stop()
        assert delays.to_file() == {"offsetTable": {1: 2}, "logPosition": end}
        await fast.standalone.start()
        assert fast.broker.parts.tables.delays.log_position == end

    async def test_it_is_written_again_after_much_log(self, fast, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.tables.delay_offsets.WRITE_EVERY", 10_000)
        delays = fast.broker.parts.tables.delays
        await peer.send(body=b"x" * 20_000)
        assert not delays.take_changes()  # no message was ever delayed
        await peer.send(properties={"DELAY": "1"})
        await take(peer, "Orders", 2)
        await until(delays.take_changes)
        delays.to_file()
        assert not delays.take_changes()
        await peer.send(body=b"x" * 10_000)
        assert delays.take_changes()

    async def test_a_refused_round_does_not_forget_what_was_delivered(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr(DelayLevels, "of", lambda config: DelayLevels((1,)))
        disk = FaultyDisk(really_sync=False)
        async with running(tmp_path, disk=disk) as (broker, peer):
            store_delayed(SimpleNamespace(broker=broker), b"", b"undeliverable")
            await peer.send(body=b"came", properties={"DELAY": "1"})
            await take(peer, "Orders", 1)
            await broker.parts.schedule.stop()
            await peer.send(body=b"late", properties={"DELAY": "1"})
        (tmp_path / "config" / "delayOffset.json").unlink()
        disk.fail("pwrite", match="commitlog")
        async with running(tmp_path, disk=disk) as (_, peer):
            found = await take(peer, "Orders", 2)
        assert [m.body for m in found] == [b"came", b"late"]
        assert sum("is not delivered" in line for line in caplog.messages) == 3  # one of them was refused

    async def test_a_log_that_cannot_be_read_does_not_stop_the_levels(self, fast, peer, monkeypatch, caplog):
        await peer.send(body=b"again", properties={"DELAY": "4"})
        await fast.close_peers()
        await fast.standalone.stop()

        async def broken(*_):
            raise OSError(5, "no")

        monkeypatch.setattr("cometmq.broker.timers.schedule.delivered", broken)
        await fast.standalone.start()
        assert [m.body for m in await take(fast.peer(), "Orders", 1)] == [b"again"]
        assert "may be repeated" in caplog.text

    async def test_what_passes_is_waited_for(self, fast, peer, monkeypatch):
        """After a temporary failure (such as too many open files) deliveries continue without duplicates."""
        await peer.send(body=b"once", properties={"DELAY": "1"})
        await take(peer, "Orders", 1)
        await fast.close_peers()
        path = Path(fast.broker.config.store.root, "config", "delayOffset.json")
        await fast.standalone.stop()
        path.unlink()
        asked = []

        async def refused(*arguments):
            asked.append(arguments)
            if len(asked) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return await delivered(*arguments)

        monkeypatch.setattr("cometmq.broker.timers.schedule.delivered", refused)
        monkeypatch.setattr("cometmq.broker.timers.schedule.ERROR_S", 0.05)
        await fast.standalone.start()
        await fast.peer().send(body=b"then", properties={"DELAY": "1"})
        assert [m.body for m in await take(fast.peer(), "Orders", 2)] == [b"once", b"then"]
        assert len(asked) == 3


def units(*positions):
    rows = [(each or 0, 100 if each else FILLER_SIZE, 0) for each in positions]
    return np.array(rows, UNIT_DTYPE)


@pytest.mark.parametrize(
    ("positions", "linked", "cursor", "others"),
    [
        ((10, 20, 30), (0,), 7, []),
        ((10, 20, 30), (5, 15, 40), 7, []),
        ((10, 20, 30), (10,), 8, []),
        ((10, 20, 30), (10, 20), 9, []),
        ((10, 20, 30), (5, 20, 25), 7, [20]),  # the first copy is lost or was never delivered
        ((10, 20, 30, 40), (10, 30, 40), 8, [30, 40]),
        ((10, 20, 30), (10, 20, 30, 40), 10, []),
        ((10, None, 30), (10,), 9, []),  # a filler record
        ((), (10,), 7, []),
    ],
)
def test_a_level_goes_on_with_the_first_that_has_no_copy(positions, linked, cursor, others):
    assert goes_on(7, 7, units(*positions), np.array(linked, np.int64)) == (cursor, others)


def test_a_level_that_has_an_open_message_before_stays_there():
    assert goes_on(4, 7, units(10, 20), np.array([10])) == (4, [10])


@pytest.fixture
def wall_clock(monkeypatch):
    """Step the wall clock: append a number of hours to the list."""
    steps = []
    real = Clock.time_ms
    monkeypatch.setattr(Clock, "time_ms", lambda self: real(self) + round(sum(steps) * 3_600_000))
    return steps


class TestClocks:
    """A step of the wall clock while a message waits 0.4 s makes its delivery neither early nor late."""

    @pytest.mark.parametrize("steps", [(-1.0,), (1.0,), (-1.0, 1.0), (1.0, -1.0), (-100_000.0,)])
    async def test_while_it_waits(self, wall_clock, peer, steps):
        await peer.send()
        await peer.send(body=b"first", properties={"DELAY": "4"})
        await asyncio.sleep(0.2)  # the level is checked in the middle of the second message's delay
        begun = time.monotonic()
        await peer.send(body=b"second", properties={"DELAY": "4"})
        for hours in steps:
            wall_clock.append(hours)
            await peer.send(properties={"DELAY": "2"})  # arrives after the step
        wanted = 3 + len(steps)
        last = (await take(peer, "Orders", wanted))[-1]
        assert last.body == b"second"
        assert 0.4 <= time.monotonic() - begun < 30.0

    @pytest.mark.parametrize("hours", [-1, 1])
    async def test_while_two_messages_wait_for_their_syncs(self, hours):
        """Both messages were stored before the step, and their syncs complete separately after it."""
        clock = ManualClock()
        schedule = ScheduleService(
            clock=clock, store=SimpleNamespace(max_offset=lambda *_: 0),
            tables=SimpleNamespace(delays=DelayOffsets()), levels=DelayLevels((60_000,)), writer=None,
        )  # fmt: skip
        await schedule.stop()  # no delivery happens from here on
        stored_ms, stored_at = clock.now_ms, clock.now_s * 1000
        clock.advance(0.005)
        clock.now_ms += hours * 3_600_000
        for offset in range(2):
            schedule.arrived([(SCHEDULE_TOPIC, 0, offset + 1, 0, stored_ms)])
        due = schedule.cursors[1].due
        waits = [due.due_ms(offset, stored_ms) - stored_at for offset in range(2)]
        assert all(60_000 <= wait <= 60_000 + 5 + STEP_MS for wait in waits), waits

    async def test_sleep_counts(self):
        clock = ManualClock()
        schedule = ScheduleService(
            clock=clock, store=SimpleNamespace(max_offset=lambda *_: 0),
            tables=SimpleNamespace(delays=DelayOffsets()), levels=DelayLevels((60_000,)), writer=None,
        )  # fmt: skip
        await schedule.stop()
        stored_ms = clock.now_ms
        for offset in range(2):
            schedule.arrived([(SCHEDULE_TOPIC, 0, offset + 1, 0, clock.now_ms)])
            due_ms = schedule.cursors[1].due.due_ms(offset, clock.now_ms) - mono_ms(clock)
            assert 60_000 <= due_ms <= 60_000 + STEP_MS
            clock.sleep(59)
        assert schedule.cursors[1].due.due_ms(0, stored_ms) - mono_ms(clock) < 0

    async def test_back_while_the_broker_is_down(self, wall_clock, fast, peer):
        await peer.send()
        begun = time.monotonic()
        await peer.send(body=b"later", properties={"DELAY": "4"})
        wall_clock.append(-1.0)
        await fast.restart()
        await take(fast.peer(), "Orders", 2)
        assert 0.4 <= time.monotonic() - begun < 30.0


async def test_a_delivery_that_is_refused_is_tried_again(fast, peer, monkeypatch):
    from cometmq.store.base.refusal import StoreRefused

    store = fast.broker.parts.store
    real, refused = type(store.appender).append, []

    def append(self, topic, *args, **named):
        if topic == "Orders" and len(refused) < 2:
            refused.append(topic)
            raise StoreRefused(14, "no room")
        return real(self, topic, *args, **named)

    await peer.send(body=b"stubborn", properties={"DELAY": "1"})
    monkeypatch.setattr(type(store.appender), "append", append)
    assert [m.body for m in await take(peer, "Orders", 1)] == [b"stubborn"]
    assert len(refused) == 2
    await until(lambda: fast.broker.parts.tables.delays.to_table() == {"offsetTable": {1: 1}})


def store_delayed(cluster, properties, body=b"raw"):
    store_raw(cluster, "SCHEDULE_TOPIC_XXXX", properties, body, delay_ms=200)


TO_ORDERS = b"REAL_TOPIC\x01Orders\x02REAL_QID\x010"


class TestUndeliverable:
    """A message that a send would refuse is skipped at its delivery and logged once."""

    @pytest.mark.parametrize(
        "properties",
        [
            b"",
            b"REAL_TOPIC\x01Orders\x02REAL_QID\x01x",
            b"REAL_TOPIC\x01Orders\x02REAL_QID\x01-1",
            b"REAL_TOPIC\x01Orders\x02REAL_QID\x01" + b"9" * 5_000,
            b"REAL_QID\x010",
            b"REAL_TOPIC\x01x/../Good\x02REAL_QID\x010",
            b"REAL_TOPIC\x01../../../../evil\x02REAL_QID\x010",
            b"REAL_TOPIC\x01n\0ul\x02REAL_QID\x010",
            b"REAL_TOPIC\x01%RETRY%" + b"g" * 300 + b"\x02REAL_QID\x010",
            *(b"REAL_TOPIC\x01" + name.encode() + b"\x02REAL_QID\x010" for name in sorted(UNSENDABLE_TOPICS)),
        ],
    )
    async def test_a_destination_that_no_send_may_have(self, fast, peer, caplog, tmp_path, properties):
        for body in (b"before", b"after"):
            await peer.send(body=body, properties={"DELAY": "1"})
            store_delayed(fast, properties, b"bad")
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"before", b"after"]
        delays = fast.broker.parts.tables.delays
        await until(lambda: delays.to_table() == {"offsetTable": {1: 4}})
        assert sum("is not delivered" in record.message for record in caplog.records) == 2
        assert sorted(fast.broker.parts.store.queues.topics()) == ["Orders", "SCHEDULE_TOPIC_XXXX"]
        assert not list(tmp_path.rglob("*evil*")) + list(tmp_path.rglob("Good"))

    async def test_a_topic_that_is_not_there_is_made_where_a_send_would_make_it(self, fast, start_cluster):
        for cluster, made in ((fast, True), (await start_cluster(autoCreateTopicEnable="false"), False)):
            store_delayed(cluster, b"REAL_TOPIC\x01Gone\x02REAL_QID\x015")
            delays = cluster.broker.parts.tables.delays
            await until(lambda delays=delays: delays.to_table() == {"offsetTable": {1: 1}})
            assert (cluster.broker.parts.store.max_offset("Gone", 5) == 1) == made
            assert ("Gone" in cluster.broker.parts.tables.topics.table) == made

    async def test_a_queue_that_the_topic_has_lost_is_replaced(self, fast, peer):
        await peer.send(queue_id=1)
        store_delayed(fast, b"REAL_TOPIC\x01Orders\x02REAL_QID\x014294967297", b"moved")
        answer = await peer.pull(queue_id=1, offset=1, hold_ms=5_000)
        assert [m.body for m in records(answer)] == [b"moved"]
        assert [queue.queue_id for queue in fast.broker.parts.store.queues.of_topic("Orders")] == [1]

    async def test_a_message_outgrown_by_a_new_limit_is_delivered_and_can_come_back(self, fast, peer):
        await peer.send(body=b"x" * 5_000, properties={"DELAY": "1"})
        fast.broker.parts.store.appender.set_max_message_size(1_000)
        (message,) = await take(peer, "Orders", 1)
        header = ConsumerSendMsgBackRequestHeader(
            offset=message.physical_offset, group="G", delay_level=1, origin_topic="Orders"
        )
        answer = await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, header)
        assert (message.body, answer.code) == (b"x" * 5_000, 0)
        assert [m.body for m in await take(peer, "%RETRY%G", 1)] == [b"x" * 5_000]

    async def test_properties_that_cannot_be_written_again_are_stored_as_they_are(self, fast, peer):
        await peer.send(body=b"before", properties={"DELAY": "1"})
        raw = b"TAGS\x01A\x02a\x01b\x01c\x02\xff\x01\xfe\x02" + TO_ORDERS
        store_delayed(fast, raw, b"odd")
        await peer.send(body=b"after", properties={"DELAY": "1"})
        found = await take(peer, "Orders", 3)
        assert [m.body for m in found] == [b"before", b"odd", b"after"]
        assert properties_of(fast.broker.parts.store.lookups.record_at(found[1].physical_offset)) == raw
        assert [m.body for m in records(await peer.pull(expression="A"))] == [b"odd"]

    async def test_a_message_with_which_we_always_fail(self, fast, monkeypatch, caplog):
        """A message whose delivery always fails is dropped after some attempts; others are delivered once."""
        monkeypatch.setattr("cometmq.broker.timers.schedule.ERROR_S", 0.02)
        real = type(fast.broker.parts.store.appender).append

        def append(self, topic, queue_id, body, *args, **named):
            if topic == "Orders" and body == b"bad":
                raise RuntimeError("a bug")
            return real(self, topic, queue_id, body, *args, **named)

        monkeypatch.setattr(type(fast.broker.parts.store.appender), "append", append)
        peer = fast.peer()
        for body in (b"before", b"bad", b"after"):
            await peer.send(body=body, properties={"DELAY": "1"})
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"before", b"after"]
        lines = [record.message for record in caplog.records if record.name.endswith("schedule")]
        assert sum("delivery at offset 1 failed" in line for line in lines) == 3
        assert sum("message at offset 1 is not delivered: a bug" in line for line in lines) == 1
        await asyncio.sleep(0.1)
        assert (await peer.pull()).ext["maxOffset"] == "2"

    async def test_a_record_that_cannot_be_read(self, fast, peer, caplog):
        schedule = fast.broker.parts.schedule
        cursor = schedule.cursors[4]
        cursor.busy = True  # no delivery begins before the log is changed
        for body in (b"before", b"unreadable", b"after"):
            await peer.send(body=body, properties={"DELAY": "4"})
        buffer = fast.broker.parts.store.log.buffer
        at = buffer.index(b"unreadable")
        buffer[at - 4 : at] = b"\x7f\0\0\0"  # the length field of its body
        schedule.run(cursor)
        assert [m.body for m in await take(peer, "Orders", 2)] == [b"before", b"after"]
        assert "message at offset 1 is not delivered" in caplog.text

    @pytest.mark.parametrize("queue_offset", [0, 1 << 40])
    async def test_a_queue_offset_that_was_changed_moves_no_level(self, fast, peer, queue_offset):
        schedule = fast.broker.parts.schedule
        cursor = schedule.cursors[4]
        cursor.busy = True  # no delivery begins before the log is changed
        for body in (b"0", b"1", b"2"):
            await peer.send(body=body, properties={"DELAY": "4"})
        store = fast.broker.parts.store
        position, *_ = store.queues.find_queue(SCHEDULE_TOPIC, 3).unit(2)
        at = bytes(store.log.buffer).index(position.to_bytes(8, "big")) - 8
        store.log.buffer[at : at + 8] = queue_offset.to_bytes(8, "big")
        await asyncio.sleep(0.1)  # so that the next message is not due yet
        await peer.send(body=b"3", properties={"DELAY": "4"})
        schedule.run(cursor)
        found = await take(peer, "Orders", 4)
        assert [message.body for message in found] == [b"0", b"1", b"2", b"3"]


async def test_a_record_that_the_device_cannot_read_is_stepped_over(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(DelayLevels, "of", lambda config: DelayLevels((300,)))
    monkeypatch.setattr("cometmq.broker.timers.schedule.ERROR_S", 0.1)
    disk = FaultyDisk(really_sync=False)
    async with running(tmp_path, disk, messageDelayLevel="1s") as (broker, peer):
        await broker.parts.schedule.stop()
        await peer.send(body=b"before", properties={"DELAY": "1"})
        position = broker.parts.store.log.end
        await peer.send(body=b"bad" * 100, properties={"DELAY": "1"})
        await peer.send(body=b"x" * 300_000)
        await peer.send(body=b"after", properties={"DELAY": "1"})
    disk.cannot_read("commitlog", position + 100)
    async with running(tmp_path, disk, messageDelayLevel="1s") as (broker, peer):
        await until(lambda: broker.parts.store.max_offset("Orders", 0) == 3)
        disk.heal()
        assert [m.body for m in records(await peer.pull(offset=1))] == [b"before", b"after"]
    assert "message at offset 1 is not delivered" in caplog.text


async def test_a_damaged_body_is_not_delivered_under_a_fresh_crc(fast, peer, caplog):
    await peer.send(body=b"rotting body", properties={"DELAY": "4"})
    await peer.send(body=b"sound", properties={"DELAY": "4"})
    buffer = fast.broker.parts.store.log.buffer
    buffer[buffer.index(b"rotting body")] ^= 1
    (message,) = await take(peer, "Orders", 1)
    assert message.body == b"sound"
    assert "is damaged at log position" in caplog.text


async def test_an_error_of_ours_is_survived(peer, monkeypatch):
    monkeypatch.setattr("cometmq.broker.timers.schedule.ERROR_S", 0.1)
    real, raised = iter_records, []

    def broken(data):
        if not raised:
            raised.append(True)
            raise RuntimeError("a bug")
        return real(data)

    monkeypatch.setattr("cometmq.broker.timers.schedule.iter_records", broken)
    await peer.send(body=b"good", properties={"DELAY": "1"})
    assert [m.body for m in await take(peer, "Orders", 1)] == [b"good"]
    assert raised


async def test_what_went_with_its_segment_is_told_and_what_is_behind_it_comes(started, monkeypatch, caplog):
    monkeypatch.setattr(DelayLevels, "of", lambda config: DelayLevels((2_000,)))
    cluster, peer = await started(**short_retention())
    for body in (b"gone", b"gone too"):
        await peer.send(body=body, properties={"DELAY": "1"})
    await move_all(cluster.broker, peer)
    await peer.send(body=b"stays", properties={"DELAY": "1"})
    assert [m.body for m in await take(peer, "Orders", 1)] == [b"stays"]
    line = "delay level 1: 2 messages were deleted with their segments before delivery, from offset 0"
    assert caplog.messages.count(line) == 1
