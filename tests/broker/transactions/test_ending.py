"""Tests of half messages and of the requests that end them."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.transactions.conftest import (
    COMMIT,
    GIVEN_UP,
    HALF,
    MANUAL,
    OP,
    ROLLBACK,
    UNKNOWN,
    Place,
    asked,
    bodies,
    check_round,
    end,
    prepare,
    stored,
)
from tests.broker.transactions.world import World
from tests.kit.brokers import create, records, refused, running, store_raw, take
from tests.kit.recording_disk import RecordingDisk
from tests.kit.waiting import until

from cometmq.broker.base.writer import SYSTEM_ERROR
from cometmq.broker.transactions import ending
from cometmq.broker.transactions import records as transaction_records
from cometmq.protocol.codes import SCHEDULE_TOPIC, RequestCode
from cometmq.protocol.headers import EndTransactionRequestHeader, ResumeCheckHalfMessageRequestHeader
from cometmq.protocol.ids import offset_id_of
from cometmq.protocol.properties.values import encode_properties
from cometmq.store import StoreRefused


@pytest.fixture
async def room(started):
    return await started(**MANUAL)


@pytest.fixture
def cluster(room):
    return room[0]


@pytest.fixture
def peer(room):
    return room[1]


class TestHalf:
    @pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
    async def test_it_waits_where_apaches_broker_keeps_it_and_nobody_sees_it(self, peer, code):
        answer = await peer.send(
            queue_id=3, body=b"half", sys_flag=4 | 1, flag=7, code=code,
            properties={"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "K", "TAGS": "T"},
        )  # fmt: skip
        assert (answer.ext["queueId"], answer.ext["queueOffset"]) == ("3", "0")
        (half,) = await stored(peer, HALF)
        assert (half.queue_id, half.sys_flag, half.flag) == (0, 1, 7)
        assert half.properties == {
            "TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": "K", "TAGS": "T", "CLUSTER": "DefaultCluster",
            "REAL_TOPIC": "Orders", "REAL_QID": "3",
        }  # fmt: skip
        assert await bodies(peer, queue_id=3) == []

    async def test_what_the_broker_alone_writes_is_left_out(self, peer):
        await prepare(peer, properties={"TRAN_PREPARED_QUEUE_OFFSET": "3", "TRANSACTION_CHECK_TIMES": "15"})
        (half,) = await stored(peer, HALF)
        assert {"TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES"} & half.properties.keys() == set()

    async def test_the_topics_are_there_from_the_first_use_on(self, cluster, peer):
        topics = cluster.broker.parts.tables.topics
        assert topics.get(HALF) is None
        place = await prepare(peer)
        assert (topics.get(HALF).write_queue_nums, topics.get(HALF).perm, topics.get(OP)) == (1, 6, None)
        await end(peer, place)
        assert topics.get(OP).write_queue_nums == 1

    @pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
    async def test_one_that_is_to_be_delivered_later_is_refused(self, peer, name):
        answer = await peer.send(properties={"TRAN_MSG": "true", "PGROUP": "PG", name: "3"})
        refused(answer, 13, name)

    async def test_one_without_a_producer_group_is_refused(self, peer):
        refused(await peer.send(properties={"TRAN_MSG": "true"}), 13, "PGROUP")

    async def test_a_batch_cannot_be_one(self, peer):
        answer = await peer.send(code=RequestCode.SEND_BATCH_MESSAGE, batch=True, sys_flag=4)
        refused(answer, 13, "sysFlag")

    async def test_what_a_consumer_sends_again_itself_is_none(self, peer):
        properties, times = {"TRAN_MSG": "true", "DELAY": "3"}, {"max_reconsume_times": 16}
        for sys_flag in (0, 4):  # old clients send these flags with TRAN_MSG
            answer = await peer.send(properties=properties, sys_flag=sys_flag, reconsume_times=1, **times)
            assert answer.code == 0
        assert await bodies(peer, HALF) == []
        assert [m.sys_flag for m in records(await peer.pull(SCHEDULE_TOPIC, 2))] == [0, 0]

    async def test_a_dead_letter_that_a_consumer_sends_itself_is_none(self, peer):
        answer = await peer.send(
            topic="%RETRY%G", properties={"TRAN_MSG": "true"}, sys_flag=4,
            reconsume_times=16, max_reconsume_times=16,
        )  # fmt: skip
        assert answer.code == 0
        assert await bodies(peer, "%DLQ%G") == [b"hello"]

    async def test_they_can_be_refused(self, started):
        _, peer = await started(rejectTransactionMessage="true")
        answer = await peer.send(properties={"TRAN_MSG": "true", "PGROUP": "PG"}, sys_flag=4)
        refused(answer, 16, "sending transaction message is forbidden")


class TestEnd:
    async def test_a_commit_lets_consumers_see_the_message(self, peer):
        await peer.send(body=b"before")
        await prepare(peer, b"other")
        place = await prepare(peer, queue_id=0, flag=7, properties={"TAGS": "T"})
        assert (await end(peer, place)).code == 0
        _, message = await stored(peer, "Orders")
        (half,) = (await stored(peer, HALF))[1:]
        assert (message.body, message.queue_offset, message.flag) == (b"half", 1, 7)
        assert (message.sys_flag, message.prepared_transaction_offset) == (8, place.position)
        assert message.properties == half.properties
        assert (message.born_timestamp_ms, message.born_host) == (half.born_timestamp_ms, half.born_host)
        assert len((await peer.pull(offset=1, expression="T")).body)
        (op,) = await stored(peer, OP)
        assert (op.body, op.properties, op.queue_id) == (b"1", {"TAGS": "d"}, 0)
        assert op.prepared_transaction_offset == message.physical_offset

    async def test_a_rollback_leaves_an_op_only(self, peer):
        place = await prepare(peer)
        assert (await end(peer, place, ROLLBACK)).code == 0
        assert await bodies(peer) == []
        (op,) = await stored(peer, OP)
        assert (op.body, op.prepared_transaction_offset) == (b"0", 0)

    async def test_of_who_does_not_know_nothing_is_noted(self, peer):
        place = await prepare(peer)
        assert (await end(peer, place, UNKNOWN)).code == 0
        refused(await end(peer, place, 4), 1, "commitOrRollback 4 is invalid")
        header = EndTransactionRequestHeader(
            producer_group="PG", tran_state_table_offset=place.offset, commit_log_offset=place.position,
            commit_or_rollback=5,
        )  # fmt: skip
        await peer.oneway(RequestCode.END_TRANSACTION, header)
        assert await bodies(peer, OP) == []
        assert (await end(peer, place)).code == 0

    @pytest.mark.parametrize("first", [COMMIT, ROLLBACK])
    @pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
    async def test_a_transaction_ends_once(self, peer, first, second):
        place = await prepare(peer)
        await end(peer, place, first)
        refused(await end(peer, place, second), 1, "the transaction has ended")
        assert len(await bodies(peer)) == (first == COMMIT)
        assert await bodies(peer, OP) == [b"0"]

    async def test_of_two_ends_in_one_tick_the_first_counts(self, peer):
        place = await prepare(peer)
        header = EndTransactionRequestHeader(
            producer_group="PG", tran_state_table_offset=0, commit_log_offset=place.position,
            commit_or_rollback=COMMIT,
        )  # fmt: skip
        for _ in range(2):
            await peer.oneway(RequestCode.END_TRANSACTION, header)
        refused(await end(peer, place), 1, "has ended")
        assert await bodies(peer) == [b"half"]

    @pytest.mark.parametrize(
        ("place", "group", "words"),
        [
            (Place(0, 0), "Other", "The producer group wrong"),
            (Place(1, 0), "PG", "The transaction state table offset wrong"),
            (Place(0, 1), "PG", "Find prepared transaction message failed"),
            (Place(0, -1), "PG", "Find prepared transaction message failed"),
            (Place(0, 1 << 60), "PG", "Find prepared transaction message failed"),
        ],
    )
    async def test_whoever_names_something_else_is_refused(self, peer, caplog, place, group, words):
        await prepare(peer)
        refused(await end(peer, place, group=group), 1, words)
        assert words in caplog.text
        assert await bodies(peer, OP) == []

    async def test_names_are_checked(self, peer):
        place = await prepare(peer)
        refused(await end(peer, place, group="a b"), 1, "illegal characters")
        refused(await end(peer, place, group="a b", version=513), 29, "illegal characters")

    async def test_an_end_of_a_lost_message_does_not_end_the_one_in_its_place(self, peer):
        place = await prepare(peer, key="mine")
        refused(await end(peer, place, key="lost"), 1, "The message id wrong")
        (half,) = await stored(peer, HALF)
        assert (await end(peer, place, key=half.offset_msg_id)).code == 0

    async def test_no_other_message_can_be_committed(self, peer):
        answer = await peer.send(properties={"PGROUP": "PG", "REAL_TOPIC": "Orders", "REAL_QID": "0"})
        assert answer.code == 0
        refused(await end(peer, Place(0, 0)), 1, "Find prepared transaction message failed")
        assert await bodies(peer) == [b"hello"]

    async def test_a_topic_that_was_deleted_meanwhile_is_made_again(self, peer):
        await create(peer)
        place = await prepare(peer, queue_id=1)
        await peer.delete_topic("Orders")
        assert (await end(peer, place)).code == 0
        assert await bodies(peer, queue_id=1) == [b"half"]

    async def test_without_a_topic_it_stays_open(self, started):
        _, peer = await started(**MANUAL, autoCreateTopicEnable="false")
        await create(peer)
        place = await prepare(peer)
        await peer.delete_topic("Orders")
        refused(await end(peer, place), 17, "Orders")
        assert await bodies(peer, OP) == []
        assert (await end(peer, place, ROLLBACK)).code == 0

    async def test_a_slave_refuses(self, tmp_path):
        async with running(tmp_path, brokerRole="SLAVE", brokerId="1") as (_, peer):
            assert (await end(peer, Place(0, 0))).code == 11

    async def test_with_sync_flush_too(self, started):
        _, peer = await started(flushDiskType="SYNC_FLUSH", **MANUAL)
        place = await prepare(peer)
        assert (await end(peer, place)).code == 0
        assert [message.body for message in await take(peer, "Orders", 1)] == [b"half"]

    async def test_what_is_not_in_memory_is_read_off_the_loop(self, cluster, peer, monkeypatch):
        place = await prepare(peer)
        disk = cluster.broker.parts.store.disk
        await cluster.restart()
        monkeypatch.setattr(type(disk), "pread_cached", lambda *_: None)
        assert (await end(cluster.peer(), place)).code == 0


async def test_ends_of_one_tick_are_stored_in_groups_messages_before_ops(monkeypatch):
    monkeypatch.setattr(ending, "MAX_WAITING_BYTES", 2_500)
    world = World(RecordingDisk())
    await world.open()
    places = [world.prepare(COMMIT if number else ROLLBACK, b"%d" % number * 1_000) for number in range(6)]
    await world.turn()
    for place in places:
        assert await world.end(place)
    await world.turn()
    committed, ops = world.messages(), world.messages(OP)
    twins = {op.body: op.prepared_transaction_offset for op in ops}
    assert twins == {b"0": 0} | {message.body[:1]: message.physical_offset for message in committed}
    records = sorted((*committed, *ops), key=lambda record: record.physical_offset)
    assert [record.body[:1] for record in records] == [
        b"%d" % number for number in (1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5)
    ]
    await world.kill()


class TestRequestsOf5x:
    @pytest.mark.parametrize(("version", "found"), [(407, None), (513, 'K"1')])
    async def test_the_answer_and_the_message_name_the_transaction(self, peer, version, found):
        properties = {"TRAN_MSG": "true", "PGROUP": "PG", "UNIQ_KEY": 'K"1', "TAGS": "A"}
        answer = await peer.send(body=b"half", queue_id=1, properties=properties, sys_flag=4, version=version)
        assert (answer.code, answer.ext["queueId"], answer.ext.get("transactionId")) == (0, "1", found)
        (half,) = await stored(peer, HALF)
        assert half.properties.get("__transactionId__") == found
        assert (half.body, half.tags, half.sys_flag) == (b"half", "A", 0)
        plain = await peer.send(properties={"UNIQ_KEY": "K2"}, version=version)
        assert "transactionId" not in plain.ext

    async def test_an_end_after_the_time_that_the_sender_has_asked_for_waits_for_a_check(self, peer):
        place = await prepare(peer, properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "0"})
        await asyncio.sleep(0.002)  # the timeout passes within the next millisecond
        refused(await end(peer, place, version=513), 604, "CHECK_IMMUNITY_TIME_IN_SECONDS")
        assert (await end(peer, place, version=513, check=True)).code == 0

    async def test_4_9_takes_it(self, peer):
        place = await prepare(peer, properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "0"})
        await asyncio.sleep(0.002)
        assert (await end(peer, place)).code == 0

    async def test_the_time_counts_from_the_store_time_and_not_by_the_producers_clock(self, peer):
        place = await prepare(peer, properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"}, born_timestamp=1_000)
        assert (await end(peer, place, version=513)).code == 0


class TestRefusingStore:
    """The store accepts only one of the two records, or neither."""

    def refuse(self, monkeypatch, cluster, topics):
        appender = type(cluster.broker.parts.store.appender)
        real = appender.append_all

        def append_all(self, messages, limits, **named):
            if messages and messages[0].queue.topic in topics:
                return dict.fromkeys(range(len(messages)), StoreRefused(14, "no room"))
            return real(self, messages, limits, **named)

        monkeypatch.setattr(appender, "append_all", append_all)

    async def test_a_commit_that_is_not_stored_can_be_tried_again(self, cluster, peer, monkeypatch):
        place = await prepare(peer)
        with monkeypatch.context() as patch:
            self.refuse(patch, cluster, {"Orders"})
            refused(await end(peer, place), 14, "no room")
        assert (await end(peer, place)).code == 0
        assert await bodies(peer) == [b"half"]

    async def test_an_op_without_room_is_owed(self, cluster, peer, monkeypatch):
        place = await prepare(peer)
        with monkeypatch.context() as patch:
            self.refuse(patch, cluster, {OP})
            assert (await end(peer, place)).code == 0
            refused(await end(peer, place), 1, "has ended")
            await check_round(cluster)
        assert await bodies(peer, OP) == []
        await check_round(cluster)
        assert await bodies(peer, OP) == [b"0"]
        assert await bodies(peer) == [b"half"]
        assert await bodies(peer, HALF) == [b"half"]

    async def test_an_unexpected_error_of_one_end_concerns_no_other_request_of_its_tick(
        self, peer, monkeypatch
    ):
        places = [await prepare(peer, b"%d" % number) for number in range(2)]
        destination, fails = transaction_records.checked_destination, iter((True, False))

        def unexpected(*given):
            if next(fails):
                raise MemoryError("none left")
            return destination(*given)

        with monkeypatch.context() as patch:
            patch.setattr(transaction_records, "checked_destination", unexpected)
            async with asyncio.timeout(10):
                first, second, sent = await asyncio.gather(
                    *(end(peer, place) for place in places), peer.send(topic="Other", body=b"sent")
                )
        refused(first, 1, "MemoryError: none left")
        assert (second.code, sent.code) == (0, 0)
        assert await bodies(peer) == [b"1"]
        assert (await end(peer, places[0])).code == 0

    async def test_a_tick_that_is_not_written_leaves_it_open(self, cluster, peer, monkeypatch):
        place = await prepare(peer)
        disk = cluster.broker.parts.store.disk

        def broken(*_):
            raise OSError(28, "full")

        with monkeypatch.context() as patch:
            self.refuse(patch, cluster, {OP})
            patch.setattr(type(disk), "pwrite", broken)
            refused(await end(peer, place), 1, "could not be written")
        assert (await end(peer, place)).code == 0
        assert await bodies(peer) == [b"half"]
        await check_round(cluster)
        assert await bodies(peer, OP) == [b"0"]

    async def test_a_commit_that_a_raft_group_has_not_confirmed_in_time_is_not_stored_again(
        self, cluster, peer, monkeypatch
    ):
        class Silent:
            decide = True

            def wait_for(self, position, waiter):
                waiter(SYSTEM_ERROR)

        place = await prepare(peer)
        with monkeypatch.context() as patch:
            patch.setattr(cluster.broker.parts.writer, "replicas", Silent())
            refused(await end(peer, place), 1, "has not committed the message in time")
        refused(await end(peer, place), 1, "has ended")
        await check_round(cluster)
        assert await bodies(peer) == [b"half"]
        assert await bodies(peer, OP) == [b"0"]


class TestResume:
    async def given_up(self, cluster, peer):
        await prepare(peer)
        for _ in range(16):
            await check_round(cluster)
        (message,) = await stored(peer, GIVEN_UP)
        return message

    async def resume(self, peer, msg_id):
        header = ResumeCheckHalfMessageRequestHeader(msg_id=msg_id)
        return await peer.call(RequestCode.RESUME_CHECK_HALF_MESSAGE, header)

    async def test_a_message_that_was_given_up_is_asked_about_again_and_can_end(self, cluster, peer):
        message = await self.given_up(cluster, peer)
        assert (await self.resume(peer, message.offset_msg_id)).code == 0
        half = (await stored(peer, HALF))[-1]
        assert half.properties["TRANSACTION_CHECK_TIMES"] == "0"
        assert "TRAN_PREPARED_QUEUE_OFFSET" not in half.properties
        await peer.heartbeat(group=None, producers=("PG",))
        await check_round(cluster)
        _, place, _ = await asked(peer)
        assert (await end(peer, place, check=True)).code == 0
        assert await bodies(peer) == [b"half"]

    async def test_the_unique_key_names_it_too_and_of_several_the_newest(self, cluster, peer):
        message = await self.given_up(cluster, peer)
        key = message.properties["UNIQ_KEY"]
        assert (await self.resume(peer, key)).code == 0
        refused(await self.resume(peer, key), 1, "resumed before")
        for _ in range(16):
            await check_round(cluster)
        assert len(await stored(peer, GIVEN_UP)) == 2
        assert (await self.resume(peer, key)).code == 0
        refused(
            await self.resume(peer, "F" * 32),
            1,
            "has no message with this offset id",
        )

    async def test_only_once(self, cluster, peer):
        message = await self.given_up(cluster, peer)
        await self.resume(peer, message.offset_msg_id)
        refused(await self.resume(peer, message.offset_msg_id), 1, "resumed before")

    async def test_of_two_requests_at_once_one_is_refused(self, cluster, peer, monkeypatch):
        message = await self.given_up(cluster, peer)
        inherited = cluster.broker.parts.transactions.ends.inherited
        real, looking, goes_on = inherited.is_resumed, asyncio.Event(), asyncio.Event()

        async def slow(half):
            found = await real(half)
            looking.set()
            await goes_on.wait()
            return found

        monkeypatch.setattr(inherited, "is_resumed", slow)
        before = len(await stored(peer, HALF))
        first = asyncio.create_task(self.resume(peer, message.offset_msg_id))
        await looking.wait()
        second = asyncio.create_task(self.resume(cluster.peer(), message.offset_msg_id))
        await asyncio.wait([second], timeout=1)
        goes_on.set()
        refused(await second, 1, "being resumed")
        assert (await first).code == 0
        assert len(await stored(peer, HALF)) == before + 1
        refused(await self.resume(peer, message.offset_msg_id), 1, "resumed before")

    async def test_only_what_was_given_up(self, peer):
        place = await prepare(peer)
        msg_id = offset_id_of("127.0.0.1:10911", place.position)
        refused(await self.resume(peer, msg_id), 1, GIVEN_UP)
        refused(await self.resume(peer, offset_id_of("127.0.0.1:10911", 1 << 40)), 1, GIVEN_UP)
        refused(await self.resume(peer, "no id"), 1, "msgId")

    async def test_one_without_a_key(self, cluster, peer):
        properties = encode_properties({"REAL_TOPIC": "Orders", "REAL_QID": "0", "PGROUP": "PG"})
        cluster.broker.parts.tables.topics.ensure(GIVEN_UP, 1)
        store_raw(cluster, GIVEN_UP, properties)
        await until(lambda: cluster.broker.parts.store.max_offset(GIVEN_UP, 0))
        (message,) = await stored(peer, GIVEN_UP)
        assert (await self.resume(peer, message.offset_msg_id)).code == 0
