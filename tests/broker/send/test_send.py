"""Sends over real sockets: responses, stored records and refusals."""

from __future__ import annotations

import asyncio
import errno
import os
import threading

import pytest
from tests.kit.brokers import records, refused

from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import ViewMessageRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.properties import values
from cometmq.protocol.properties.values import encode_properties
from cometmq.store.base.disk import Disk

MIB = 1 << 20
ILLEGAL = ResponseCode.MESSAGE_ILLEGAL
V1, V2, BATCH = RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE


@pytest.mark.parametrize("code", [V1, V2])
async def test_a_message_is_stored_as_it_was_sent(cluster, peer, code):
    properties = {"KEYS": "k1 k2", "WAIT": "true", "TAGS": "TagA", "UNIQ_KEY": "AC10", "mine": "ünï"}
    answer = await peer.send(
        body=b"\0body\xff", queue_id=2, properties=properties, code=code, flag=7, sys_flag=1
    )
    assert answer.code == 0
    assert answer.remark is None
    ext = answer.ext
    place = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "queueId": "2", "queueOffset": "0"}
    assert {key: ext[key] for key in place} == place
    (message,) = records(await peer.pull(queue_id=2))
    assert message.body == b"\0body\xff"
    assert (message.flag, message.sys_flag, message.queue_id, message.queue_offset) == (7, 1, 2, 0)
    assert message.offset_msg_id == ext["msgId"]
    assert decode_offset_id(ext["msgId"]).host == cluster.addr
    stored = {name: value for name, value in properties.items() if name != "WAIT"}
    assert message.properties == {**stored, "CLUSTER": "DefaultCluster"}
    assert message.born_host.startswith("127.0.0.1:")


async def test_offsets_of_a_queue_have_no_gap_however_the_sends_interleave(peer):
    answers = await asyncio.gather(*(peer.send(body=b"%d" % n, queue_id=n % 3) for n in range(300)))
    for queue_id in range(3):
        of_queue = [answer.ext for answer in answers if answer.ext["queueId"] == str(queue_id)]
        assert [int(ext["queueOffset"]) for ext in of_queue] == list(range(100))
    assert len({answer.ext["msgId"] for answer in answers}) == 300


async def test_oneway_sends_are_stored_and_never_answered(peer):
    for number in range(5):
        await peer.send(body=b"%d" % number, oneway=True)
    assert int((await peer.send(body=b"last")).ext["queueOffset"]) == 5
    assert [m.body for m in records(await peer.pull())] == [b"0", b"1", b"2", b"3", b"4", b"last"]
    connection = peer.remoting.connection(peer.addr)
    assert connection.outstanding == 0


@pytest.mark.parametrize("size", [1, 40_000])  # a long body is stored before the tick ends
async def test_a_oneway_send_alone_is_stored(peer, size):
    await peer.send()
    await peer.send(body=bytes(size), oneway=True)
    assert [m.body for m in records(await peer.pull(offset=1, hold_ms=2_000))] == [bytes(size)]


async def test_what_the_store_refuses_is_answered_beside_what_it_takes(cluster, peer):
    """Refused and accepted sends share a tick; the fast path of known headers is tested, too."""
    properties = {"UNIQ_KEY": "AC10", "WAIT": "true"}
    await peer.send()
    sizes = [10, 4 * MIB + 1, 20, 40_000, 30, 4 * MIB + 2]
    for _ in range(4):
        answers = await asyncio.gather(
            *(peer.send(body=bytes(size), properties=properties) for size in sizes)
        )
        assert [answer.code for answer in answers] == [0, ILLEGAL, 0, 0, 0, ILLEGAL]
        assert "msg body length limit 4194304B" in answers[1].remark
        assert f"this one has {4 * MIB + 2}B" in answers[5].remark
    assert len(cluster.broker.parts.sends.templates) == 1
    assert [len(m.body) for m in records(await peer.pull(offset=13))] == [10, 20, 40_000, 30]


@pytest.mark.parametrize("properties", [{"DELAY": "5"}, {"TRAN_MSG": "true", "PGROUP": "PG"}])
async def test_the_answer_names_the_queue_that_was_asked_for_wherever_the_message_waits(peer, properties):
    assert (await peer.send(queue_id=1, properties=properties)).ext["queueId"] == "1"


async def test_a_negative_queue_id_lets_the_broker_choose(peer):
    queues = {(await peer.send(queue_id=-1)).ext["queueId"] for _ in range(60)}
    assert queues <= {"0", "1", "2", "3"}
    assert len(queues) > 1


class TestBatch:
    ITEMS = tuple((n, b"b%d" % n, encode_properties({"TAGS": f"T{n}", "WAIT": "true"})) for n in range(3))

    async def test_the_messages_of_a_batch_follow_each_other(self, peer):
        await peer.send(queue_id=1)
        answer = await peer.send(
            body=encode_batch(self.ITEMS), queue_id=1, code=BATCH, batch=True, properties={"WAIT": "true"}
        )
        assert answer.code == 0
        ids = answer.ext["msgId"].split(",")
        assert (len(ids), answer.ext["queueOffset"], answer.ext["queueId"]) == (3, "1", "1")
        found = records(await peer.pull(queue_id=1, offset=1))
        assert [(m.body, m.queue_offset, m.flag, m.tags) for m in found] == [
            (b"b0", 1, 0, "T0"),
            (b"b1", 2, 1, "T1"),
            (b"b2", 3, 2, "T2"),
        ]
        assert [m.offset_msg_id for m in found] == ids
        assert all(m.properties["CLUSTER"] == "DefaultCluster" for m in found)

    async def test_a_4_9_batch_spreads_its_own_properties_a_5_x_batch_does_not(self, peer):
        batch = {"body": encode_batch(self.ITEMS), "code": BATCH, "batch": True}
        for version in (409, 513):
            await peer.send(properties={"UNIQ_KEY": "OF-THE-BATCH"}, version=version, **batch)
        found = records(await peer.pull())
        assert [m.properties.get("UNIQ_KEY") for m in found] == ["OF-THE-BATCH"] * 3 + [None] * 3

    @pytest.mark.parametrize("cut", [1, 5, 20, -1])
    async def test_a_broken_batch_is_refused_as_a_whole(self, peer, cut):
        await peer.send()
        answer = await peer.send(body=encode_batch(self.ITEMS)[:cut], code=BATCH, batch=True)
        assert answer.code == 13
        assert len(records(await peer.pull())) == 1

    async def test_an_empty_batch_and_a_batch_of_retries_are_refused(self, peer):
        assert (await peer.send(body=b"", code=BATCH, batch=True)).code == 13
        answer = await peer.send("%RETRY%G", encode_batch(self.ITEMS), code=BATCH, batch=True)
        assert answer.code == 13


class TestRefusals:
    @pytest.mark.parametrize(
        ("topic", "version", "code", "words"),
        [
            ("", 407, 1, "blank"),
            ("  ", 407, 1, "blank"),
            ("a b", 407, 1, "illegal characters"),
            ("Ordérs", 407, 1, "illegal characters"),
            ("t" * 128, 407, 1, "longer"),
            ("a b", 513, 29, "illegal characters"),
            ("SCHEDULE_TOPIC_XXXX", 407, 16, "forbidden"),
            ("SELF_TEST_TOPIC", 407, 16, "forbidden"),
            ("RMQ_SYS_TRANS_HALF_TOPIC", 407, 16, "forbidden"),
        ],
    )
    async def test_topics_that_nobody_may_send_to(self, peer, topic, version, code, words):
        refused(await peer.send(topic, version=version), code, words)

    async def test_a_topic_that_may_not_be_created(self, peer):
        answer = await peer.send("New", default_topic="NoTemplate")
        assert (answer.code, answer.remark) == (17, "topic[New] not exist, apply first please!")
        assert (await peer.send("New", default_topic=None)).code == 17
        assert (await peer.send("New", default_topic="SELF_TEST_TOPIC")).code == 17
        assert (await peer.send("New")).code == 0

    @pytest.mark.parametrize(("version", "code"), [(407, 1), (513, 29)])
    async def test_a_queue_that_does_not_exist(self, peer, version, code):
        await peer.send()
        refused(await peer.send(queue_id=4, version=version), code, "queueId[4] is illegal")

    async def test_what_is_too_large(self, peer):
        assert (await peer.send(body=b"x" * (4 * 1024 * 1024))).code == 0
        assert (await peer.send(body=b"x" * (4 * 1024 * 1024 + 1))).code == 13
        assert (await peer.send(properties={"big": "x" * 32_767})).code == 13
        assert int((await peer.send()).ext["queueOffset"]) == 1

    @pytest.mark.parametrize("name", ["TAGS", "KEYS", "user"])
    async def test_long_properties_are_refused_before_anything_of_them_is_hashed(
        self, peer, monkeypatch, name
    ):
        hashed = []
        monkeypatch.setattr(values, "java_hash", lambda text: hashed.append(text) or 0)
        answers = [
            await peer.send(properties={name: "x" * (1 << 20), "UNIQ_KEY": "u"}),
            await peer.send(body=encode_batch([(0, b"x", b"A\x01b")]), properties={name: "x" * (1 << 20)},
                            batch=True, code=RequestCode.SEND_BATCH_MESSAGE),
        ]  # fmt: skip
        assert [answer.code for answer in answers] == [13, 13]
        assert all("32767" in answer.remark for answer in answers)
        assert max(map(len, hashed), default=0) < 100

    @pytest.mark.parametrize(
        "bad",
        [
            "a\x01b\x01c\x02UNIQ_KEY\x01U4",
            "TAGS\x01A\x02UNIQ_KEY\x01U4\x01x\x02",
            "TAGS\x01A\x02UNIQ_KEY\x01U4\x02x\x02",
            "x\x02UNIQ_KEY\x01U4\x02",
        ],
    )
    async def test_a_separator_inside_of_a_property_is_refused(self, peer, bad):
        """The message is refused both as a first message and after many similar ones."""
        good = "TAGS\x01A\x02UNIQ_KEY\x01U%d\x02"
        for number in range(3):
            assert (await peer.send(properties_text=good % number)).code == 0
            answer = await peer.send(properties_text=bad)
            assert (answer.code, "0x01 or 0x02" in answer.remark) == (13, True)
        batch = {"code": RequestCode.SEND_BATCH_MESSAGE, "batch": True}
        alike = [good.replace("U%d", key) for key in ("\x01a", "\x02a", "a\x01")]
        mixed = [[good % 1, *[good % 2] * 3, each] for each in alike]
        for texts in ([bad], [good % 1, bad], [good % 1, good % 2, bad], [bad, "KEYS\x01k"], *mixed):
            body = encode_batch([(0, b"x", text.encode()) for text in texts])
            assert (await peer.send(body=body, **batch)).code == 13
        body = encode_batch([(0, b"x", b"KEYS\x01k")])
        assert (await peer.send(body=body, properties_text=bad, **batch)).code == 13
        assert (await peer.pull()).ext["maxOffset"] == "3"

    async def test_a_missing_field_is_named(self, peer):
        ext = {"b": "Orders", "e": "0", "f": "0", "g": "1"}
        refused(await peer.call(V2, None, b"x", ext=ext), 1, "field h")

    async def test_auto_creation_can_be_switched_off(self, started):
        _, peer = await started(autoCreateTopicEnable="false")
        assert (await peer.send("New")).code == 17
        assert (await peer.send("%RETRY%G")).code == 0  # retry topics are created all the same

    async def test_before_the_accepted_time_nothing_is_taken(self, start_cluster):
        cluster = await start_cluster(startAcceptSendRequestTimeStamp=str(2**62))
        refused(await cluster.peer().send(), 1, "broker unable to service")


class TestCreatedTopics:
    async def test_queues_and_permission_come_from_the_template(self, cluster, peer):
        await peer.send("Few", default_topic_queue_nums=3)
        await peer.send("Many", default_topic_queue_nums=99)
        await peer.send("ByCluster", default_topic="DefaultCluster", default_topic_queue_nums=99)
        table = cluster.broker.parts.tables.topics.table
        assert [(table[name].write_queue_nums, table[name].read_queue_nums, table[name].perm) for name in
                ("Few", "Many", "ByCluster")] == [(3, 3, 6), (8, 8, 6), (16, 16, 6)]  # fmt: skip

    async def test_the_name_server_hears_of_it_and_the_file_keeps_it(self, cluster, peer):
        await peer.send("Fresh")
        namesrv = cluster.peer(cluster.namesrv_addr)
        async with asyncio.timeout(60):
            while (await namesrv.call(105, None, ext={"topic": "Fresh"})).code != 0:
                await asyncio.sleep(0.01)
        version = cluster.broker.parts.tables.topics.version
        await cluster.restart()
        topics = cluster.broker.parts.tables.topics
        assert topics.table["Fresh"].write_queue_nums == 4
        assert topics.version == version


async def test_what_was_sent_is_there_after_a_restart(cluster, peer):
    await peer.send_numbers(10)
    await cluster.restart()
    peer = cluster.peer()
    assert [m.body for m in records(await peer.pull())] == [b"%d" % number for number in range(10)]
    assert int((await peer.send()).ext["queueOffset"]) == 10


@pytest.fixture
def _synced_here(monkeypatch):
    """Sync in this process, because a patch that slows the disk works in this process only."""
    right = Disk.__init__

    def keep_descriptors(self):
        right(self)
        self.lends_descriptors = False

    monkeypatch.setattr(Disk, "__init__", keep_descriptors)


class TestSyncFlush:
    async def test_an_answer_means_that_the_bytes_are_on_the_disk(self, started):
        cluster, peer = await started(flushDiskType="SYNC_FLUSH")
        store = cluster.broker.parts.store
        answers = await asyncio.gather(*(peer.send(body=b"%d" % n) for n in range(50)))
        assert all(answer.code == 0 for answer in answers)
        assert store.flusher.flushed == store.log.end
        assert len(records(await peer.pull())) == 32

    async def test_a_held_pull_wakes_when_the_message_is_flushed(self, started):
        _, peer = await started(flushDiskType="SYNC_FLUSH")
        await peer.send()
        pulling = asyncio.create_task(peer.pull(offset=1, hold_ms=10_000))
        await asyncio.sleep(0)
        await peer.send(body=b"second")
        assert [m.body for m in records(await pulling)] == [b"second"]

    async def test_the_flush_mode_may_change_while_sends_wait_for_the_end_of_the_tick(self, start_cluster):
        cluster = await start_cluster(flushDiskType="SYNC_FLUSH")
        peer, parts = cluster.peer(), cluster.broker.parts
        await peer.send()
        batch = encode_batch(TestBatch.ITEMS)
        for mode in ("ASYNC_FLUSH", "SYNC_FLUSH"):
            changes: list[bool] = []

            def change(mode=mode, changes=changes) -> None:
                if not changes and parts.store.appender.waiting():
                    changes.append(True)
                    parts.store.configure(parts.store.config.replace(flush_disk_type=mode))
                    parts.writer.configure()

            for callback in (change, parts.writer.end_tick):  # the change is applied first
                parts.tick.remove(callback)
                parts.tick.at_end(callback)
            answers = await asyncio.gather(peer.send(), peer.send(body=batch, code=BATCH, batch=True))
            parts.tick.remove(change)
            assert changes
            assert [answer.code for answer in answers] == [0, 0]

    @pytest.mark.usefixtures("_synced_here")
    async def test_a_slow_disk_gives_code_10_with_the_ids_of_what_is_stored(self, started, monkeypatch):
        cluster, peer = await started(flushDiskType="SYNC_FLUSH", syncFlushTimeout="150")
        await peer.send()
        store = cluster.broker.parts.store

        blocked = threading.Event()
        real = store.disk.fdatasync
        monkeypatch.setattr(type(store.disk), "fdatasync", lambda self, fd: (blocked.wait(20), real(fd))[1])
        try:
            answer = await peer.send(body=b"late")
            assert answer.code == 10
            assert answer.ext["queueOffset"] == "1"
            assert "MSG_REGION" in answer.ext
            careless = await peer.send(body=b"does not wait", properties={"WAIT": "false"})
            assert careless.code == 0
        finally:
            blocked.set()
        assert (await peer.send(body=b"fine again")).code == 0
        assert [m.body for m in records(await peer.pull())][1:] == [b"late", b"does not wait", b"fine again"]

    @pytest.mark.usefixtures("_synced_here")
    async def test_after_a_failed_sync_nothing_is_acknowledged_and_the_reason_is_told(
        self, started, monkeypatch
    ):
        cluster, peer = await started(flushDiskType="SYNC_FLUSH")
        await peer.send(body=b"before")
        disk = type(cluster.broker.parts.store.disk)
        failures = [OSError(errno.EIO, "Input/output error")]

        def fail(_disk, fd):  # fail only the log's sync: the topic table is synced at the same time
            if failures and "commitlog" in os.readlink(f"/proc/self/fd/{fd}"):
                raise failures.pop()

        monkeypatch.setattr(disk, "fdatasync", fail)
        waiting = await asyncio.gather(*(peer.send(body=b"%d" % n) for n in range(3)))
        assert {answer.code for answer in waiting} <= {1, 14}
        assert waiting[0].remark == "the flush to disk failed: Input/output error"
        again = await peer.send(body=b"after")  # a sync would succeed now, but would prove nothing
        assert (again.code, "could not be flushed" in again.remark) == (14, True), again.remark
        assert [m.body for m in records(await peer.pull())] == [b"before"]


async def test_a_view_by_id_finds_what_the_answer_named(peer):
    answer = await peer.send(body=b"look at me")
    offset = decode_offset_id(answer.ext["msgId"]).physical_offset
    found = await peer.call(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessageRequestHeader(offset=offset))
    assert [m.body for m in records(found)] == [b"look at me"]


@pytest.mark.usefixtures("_synced_here")
async def test_a_stop_lets_senders_hear_of_their_flush(started, monkeypatch):
    cluster, peer = await started(flushDiskType="SYNC_FLUSH")
    await peer.send()
    disk = cluster.broker.parts.store.disk
    begun, go_on, real = threading.Event(), threading.Event(), disk.fdatasync

    def slow(self, fd):
        begun.set()
        go_on.wait(20)
        real(fd)

    monkeypatch.setattr(type(disk), "fdatasync", slow)
    sending = asyncio.create_task(peer.send(body=b"in flight"))
    await asyncio.to_thread(begun.wait, 5)
    stopping = asyncio.create_task(cluster.standalone.stop())
    await asyncio.sleep(0.05)
    assert not sending.done()
    go_on.set()
    assert (await sending).code == 0
    await stopping
