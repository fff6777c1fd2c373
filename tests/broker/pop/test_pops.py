"""Pops, acks and changes of leases over real connections."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.pop.conftest import RETRY_TOPIC, V5, PopClient, offset_in
from tests.kit.brokers import create, records, refused, running, take
from tests.kit.waiting import until

from cometmq.broker.pop import leases, polls
from cometmq.broker.pop.pops import Pops
from cometmq.broker.pop.retries import Retries
from cometmq.broker.pull import pull
from cometmq.protocol.bodies import BatchAckMessageRequestBody, pack_acks
from cometmq.protocol.codes import SCHEDULE_TOPIC, RequestCode
from cometmq.protocol.headers import (
    GroupQueueRequestHeader,
    PeekMessageRequestHeader,
    WithdrawPopRequestHeader,
)
from cometmq.protocol.pop import TopicKind


async def test_messages_are_popped_once_and_acked(cluster, peer, consumer):
    await peer.send_numbers(5)
    first = await consumer.pop(3)
    assert (first.bodies, first.answer.ext["restNum"]) == (["0", "1", "2"], "2")
    second = await consumer.pop()
    assert (second.bodies, second.answer.ext["restNum"]) == (["3", "4"], "0")
    assert (await consumer.pop()).code == 210
    assert await consumer.ack(first.handles[1]) == 0
    assert offset_in(cluster) == 0
    assert await consumer.ack(first.handles[0]) == 0
    assert offset_in(cluster) == 2
    for handle in (first.handles[2], *second.handles):
        assert await consumer.ack(handle) == 0
    assert offset_in(cluster) == 5
    assert len(cluster.broker.parts.pops.leases) == 0


async def test_all_queues_of_the_topic_are_popped(peer, consumer):
    for queue_id in range(4):
        await peer.send(queue_id=queue_id, body=b"%d" % queue_id)
    found = await consumer.pop()
    assert sorted(found.bodies) == ["0", "1", "2", "3"]
    assert {handle.queue_id for handle in found.handles} == {0, 1, 2, 3}
    await peer.send(queue_id=2, body=b"again")
    await peer.send(queue_id=3, body=b"other")
    assert (await consumer.pop(queue_id=2)).bodies == ["again"]


@pytest.mark.parametrize(("mode", "bodies"), [(0, ["0", "1", "2"]), (1, ["0", "1", "2"])])
async def test_a_new_group_receives_all_of_a_young_queue(peer, consumer, mode, bodies):
    await peer.send_numbers(3)
    assert (await consumer.pop(init_mode=mode)).bodies == bodies


async def test_a_new_group_that_begins_at_the_end_of_an_old_queue_receives_the_last_message(
    cluster, peer, consumer, monkeypatch
):
    await peer.send_numbers(3)
    monkeypatch.setattr("cometmq.broker.pop.pops.is_on_disk", lambda *_: True)
    assert (await consumer.pop(init_mode=1)).bodies == ["2"]


async def test_a_filter_selects_messages_and_the_others_count_as_done(cluster, peer, consumer):
    for tag in ("A", "B", "A", "C"):
        await peer.send(body=tag.encode(), properties={"TAGS": tag})
    found = await consumer.pop(exp="A", exp_type="TAG")
    assert (found.bodies, [handle.offset for handle in found.handles]) == (["A", "A"], [0, 2])
    for handle in found.handles:
        assert await consumer.ack(handle) == 0
    assert offset_in(cluster) == 4


async def test_an_sql_filter_is_compiled_and_applied(peer, consumer):
    for number in range(6):
        await peer.send(body=b"%d" % number, properties={"n": str(number)})
    found = await consumer.pop(exp="n > 3", exp_type="SQL92")
    assert found.bodies == ["4", "5"]
    waiting = asyncio.create_task(consumer.pop(hold_ms=20_000, exp="n > 3", exp_type="SQL92"))
    await peer.send(body=b"no", properties={"n": "1"})
    await peer.send(body=b"yes", properties={"n": "7"})
    assert (await waiting).bodies == ["yes"]
    refused((await consumer.pop(exp="n >", exp_type="SQL92")).answer, 23, "parse the consumer's subscription")


async def test_many_messages_that_no_filter_wants_do_not_hide_one(peer, consumer, monkeypatch):
    monkeypatch.setattr("cometmq.broker.pop.pops._MAX_READS", 1)
    for _ in range(900):
        await peer.send(properties={"TAGS": "X"}, oneway=True)
    await peer.send(body=b"rare", properties={"TAGS": "A"})
    assert (await consumer.pop(exp="A", exp_type="TAG")).bodies == ["rare"]


class TestWaiting:
    async def test_a_pop_waits_for_a_message(self, cluster, peer, consumer):
        await create(peer)
        pops = cluster.broker.parts.pops.pops
        waiting = asyncio.create_task(consumer.pop(hold_ms=20_000))
        await until(lambda: len(pops.polls))
        header = GroupQueueRequestHeader(consumer_group="G", topic="Orders", queue_id=-1)
        assert (await peer.call(RequestCode.POLLING_INFO, header)).ext["pollingNum"] == "1"
        await peer.send(queue_id=1, body=b"news")
        assert (await waiting).bodies == ["news"]
        assert len(pops.polls) == 0

    async def test_a_pop_ends_after_its_time(self, peer, consumer):
        await create(peer)
        assert (await consumer.pop(hold_ms=1)).code == 210

    async def test_one_message_wakes_one_pop_of_each_group(self, cluster, peer, consumer):
        await create(peer)
        polls_ = cluster.broker.parts.pops.pops.polls
        waiting = [asyncio.create_task(consumer.pop(hold_ms=20_000, consumer_group=group)) for group in "GGH"]
        await until(lambda: len(polls_) == 3)
        await peer.send(body=b"1")
        await until(lambda: len(polls_) == 1)
        await peer.send(body=b"2")
        found = [each.bodies for each in await asyncio.gather(*waiting[:2])]
        assert sorted(found) == [["1"], ["2"]]
        assert (await waiting[2]).bodies == ["1"]

    async def test_what_one_pop_leaves_wakes_the_next(self, cluster, peer, consumer):
        await create(peer)
        waiting = [asyncio.create_task(consumer.pop(1, hold_ms=20_000)) for _ in range(3)]
        await until(lambda: len(cluster.broker.parts.pops.pops.polls) == 3)
        await asyncio.gather(*(peer.send(body=b"%d" % number, oneway=True) for number in range(3)))
        bodies = [each.bodies for each in await asyncio.gather(*waiting)]
        assert sorted(bodies) == [["0"], ["1"], ["2"]]

    async def test_a_filter_decides_which_message_wakes(self, cluster, peer, consumer):
        await create(peer)
        waiting = asyncio.create_task(consumer.pop(hold_ms=20_000, exp="A", exp_type="TAG"))
        await until(lambda: len(cluster.broker.parts.pops.pops.polls))
        await peer.send(properties={"TAGS": "B"})
        await peer.send(body=b"wanted", properties={"TAGS": "A"})
        assert (await waiting).bodies == ["wanted"]

    async def test_the_pops_of_a_key_are_limited(self, cluster, peer, consumer, monkeypatch):
        await create(peer)
        monkeypatch.setattr(polls, "MAX_PER_KEY", 1)
        waiting = asyncio.create_task(consumer.pop(hold_ms=20_000))
        await until(lambda: len(cluster.broker.parts.pops.pops.polls))
        assert (await consumer.pop(hold_ms=20_000)).code == 209
        await peer.send(body=b"1")
        assert (await waiting).bodies == ["1"]

    async def test_long_filters_of_parked_pops_are_limited(self, cluster, peer, consumer, monkeypatch):
        monkeypatch.setattr(polls, "MAX_PARKED", 3)
        await create(peer)
        tags = "||".join(f"tag-{number}" for number in range(2 * polls.TAGS_PER_POP))
        first = asyncio.create_task(consumer.pop(hold_ms=20_000, exp=tags))
        await until(lambda: len(cluster.broker.parts.pops.pops.polls))
        assert (await consumer.pop(hold_ms=20_000)).code == 209
        await peer.send(properties={"TAGS": "tag-1"})
        assert (await first).code == 0
        assert (await consumer.pop(hold_ms=1)).code == 210

    async def test_a_client_withdraws_a_pop(self, cluster, peer, consumer):
        await create(peer)
        polls_ = cluster.broker.parts.pops.pops.polls
        waiting = asyncio.create_task(consumer.pop(hold_ms=20_000))
        await until(lambda: len(polls_) == 1)
        ((_, opaque),) = polls_._numbered  # noqa: SLF001
        other = cluster.peer()
        header = WithdrawPopRequestHeader(request=opaque)
        assert (await other.call(RequestCode.WITHDRAW_POP, header)).code == 0
        assert len(polls_) == 1
        assert (await peer.call(RequestCode.WITHDRAW_POP, header)).code == 0
        assert (await waiting).code == 210
        assert len(polls_) == 0

    async def test_an_ordered_pop_that_leaves_last_leaves_no_topics_of_others(self, cluster, peer, consumer):
        await create(peer)
        polls_ = cluster.broker.parts.pops.pops.polls
        waiting = []
        for count, order in enumerate((False, True)):
            waiting.append(asyncio.create_task(consumer.pop(hold_ms=20_000, order=order)))
            await until(lambda count=count: len(polls_) == count + 1)
        for _, opaque in list(polls_._numbered):  # noqa: SLF001
            await peer.call(RequestCode.WITHDRAW_POP, WithdrawPopRequestHeader(request=opaque))
        assert [each.code for each in await asyncio.gather(*waiting)] == [210, 210]
        assert not polls_.waits_for(RETRY_TOPIC)
        assert polls_.arrived([(RETRY_TOPIC, 0, 1, 0, 0)]) == []

    async def test_a_group_with_its_share_of_leases_is_refused(self, peer, consumer, monkeypatch):
        monkeypatch.setattr(leases, "MAX_LEASES", 4)
        monkeypatch.setattr(leases, "MIN_LEASES_PER_GROUP", 0)
        await peer.send_numbers(4)
        found = await consumer.pop(2)
        assert (await consumer.pop(hold_ms=20_000)).code == 209
        assert (await consumer.pop(1, consumer_group="H")).bodies == ["0"]
        assert await consumer.ack(found.handles[0]) == 0
        assert (await consumer.pop(1)).bodies == ["2"]

    async def test_a_closed_connection_leases_nothing(self, cluster, peer, consumer):
        await create(peer)
        polls_ = cluster.broker.parts.pops.pops.polls
        gone = cluster.peer()
        waiting = asyncio.create_task(PopClient(gone).pop(hold_ms=20_000))
        await until(lambda: len(polls_))
        await gone.close()
        await asyncio.gather(waiting, return_exceptions=True)
        await until(lambda: not len(polls_))
        await peer.send(body=b"1")
        assert (await consumer.pop()).bodies == ["1"]

    async def test_arrivals_are_reported_only_while_pops_wait(self, cluster, peer, consumer):
        await create(peer)
        pops = cluster.broker.parts.pops.pops
        waiting = asyncio.create_task(consumer.pop(hold_ms=20_000))
        await until(lambda: len(pops.polls))
        pops.sweep()
        queues = cluster.broker.parts.store.dispatcher.watched
        assert ("Orders", 1) in queues
        await peer.send()
        await waiting
        pops.sweep()
        assert ("Orders", 1) not in queues

    async def test_delayed_messages_are_delivered_after_a_pop_of_their_topic(self, cluster, peer, consumer):
        parts = cluster.broker.parts
        assert (await consumer.pop(topic=SCHEDULE_TOPIC, hold_ms=1)).code == 210
        parts.pops.pops.sweep()
        assert (SCHEDULE_TOPIC, 0) in parts.store.dispatcher.watched

    async def test_a_notification_leases_nothing(self, cluster, peer, consumer):
        await create(peer)
        waiting = asyncio.create_task(consumer.notification())
        await until(lambda: len(cluster.broker.parts.pops.pops.polls))
        await peer.send(body=b"1")
        assert (await waiting).ext["hasMsg"] == "true"
        assert (await consumer.notification(hold_ms=0)).ext["hasMsg"] == "true"
        assert (await consumer.pop()).bodies == ["1"]
        assert (await consumer.notification(hold_ms=0)).ext["hasMsg"] == "false"

    async def test_a_notification_does_not_take_the_message_from_a_parked_pop(self, cluster, peer, consumer):
        await create(peer)
        polls = cluster.broker.parts.pops.pops.polls
        notified = asyncio.create_task(consumer.notification())
        await until(lambda: len(polls) == 1)
        popped = asyncio.create_task(consumer.pop(hold_ms=20_000))
        await until(lambda: len(polls) == 2)
        await peer.send(body=b"1")
        assert (await notified).ext["hasMsg"] == "true"
        assert len(polls) == 0
        assert (await popped).bodies == ["1"]


async def test_a_peek_reads_messages_without_a_lease(peer, consumer):
    await create(peer)
    header = PeekMessageRequestHeader(topic="Orders", queue_id=-1, max_msg_nums=2, consumer_group="G")
    refused(await peer.call(RequestCode.PEEK_MESSAGE, header, version=V5), 19, "NO_MESSAGE_IN_QUEUE")
    await peer.send_numbers(3)
    await consumer.pop(1)
    for _ in range(2):
        answer = await peer.call(RequestCode.PEEK_MESSAGE, header, version=V5)
        assert [message.body for message in records(answer)] == [b"1", b"2"]
    assert (await consumer.pop()).bodies == ["1", "2"]


class TestLeases:
    async def test_an_expired_message_comes_from_the_retry_topic(self, cluster, peer, consumer):
        await peer.send(body=b"1", properties={"TAGS": "A", "KEYS": "k"})
        first = await consumer.pop(invisible_ms=10)
        again = await consumer.pop_until(5)
        (message,), (handle,) = again.messages, again.handles
        assert (message.topic, message.reconsume_times, handle.kind) == ("Orders", 1, TopicKind.RETRY_V1)
        assert message.properties["POP_CK"] == handle.encode()
        assert message.properties["1ST_POP_TIME"] == first.answer.ext["popTime"]
        assert (message.tags, message.keys) == ("A", ("k",))
        assert offset_in(cluster) == 1
        assert await consumer.ack(first.handles[0]) == 208
        assert await consumer.ack(handle) == 0
        assert offset_in(cluster, topic=RETRY_TOPIC) == 1

    async def test_retries_of_two_groups_whose_retry_topics_have_one_name(self, cluster, peer, consumer):
        """Both are `%RETRY%a_b_c`."""
        for topic in ("c", "b_c"):
            await create(peer, topic)
        await peer.send("c", b"of c")
        of_c = {"consumer_group": "a_b", "topic": "c"}
        assert (await consumer.pop(**of_c, invisible_ms=1)).bodies == ["of c"]
        assert (await consumer.pop_until(3, **of_c)).bodies == ["of c"]
        assert (await consumer.pop(consumer_group="a", topic="b_c")).code == 210
        assert (await consumer.pop(consumer_group="a", topic="b_c")).code == 210

    async def test_a_group_that_pulls_gets_no_retries_of_pops(self, peer, consumer, monkeypatch):
        """`%RETRY%a_b_c` is the retry topic of the group that pulls, too."""
        monkeypatch.setattr(pull, "FILTER_SCAN_S", 60.0)
        await create(peer, "b_c")
        await peer.send("b_c", b"popped", 0, {"n": "5"})
        of_bc = {"consumer_group": "a", "topic": "b_c"}
        assert (await consumer.pop(**of_bc, invisible_ms=1)).bodies == ["popped"]
        assert (await consumer.pop_until(3, **of_bc)).bodies == ["popped"]
        await create(peer, "%RETRY%a_b_c", 1, 1)
        for body, number in ((b"sent back", "5"), (b"other", "6")):
            properties = {"RETRY_TOPIC": "Orders", "ORIGIN_GROUP": "x", "n": number}
            await peer.send("%RETRY%a_b_c", body, 0, properties)
        fives = {"expression": "n = 5", "expression_type": "SQL92"}
        for group in ("a_b_c", "tool"):
            pulled = records(await peer.pull("%RETRY%a_b_c", group=group))
            assert [each.body for each in pulled] == [b"sent back", b"other"]
            pulled = records(await peer.pull("%RETRY%a_b_c", group=group, **fives))
            assert [each.body for each in pulled] == [b"sent back"]
        assert len(records(await peer.pull("%RETRY%a_b_c", group="TOOLS_CONSUMER"))) == 3

    async def test_a_retry_topic_cannot_be_popped(self, peer, consumer):
        """The members of several groups may have the rights to it."""
        await create(peer, "%RETRY%a_b_c", 1, 1)
        for group in ("a", "a_b_c"):
            place = {"consumer_group": group, "topic": "%RETRY%a_b_c"}
            refused((await consumer.pop(**place)).answer, 16, "retry topics cannot be popped")
            header = PeekMessageRequestHeader(queue_id=-1, max_msg_nums=2, **place)
            answer = await peer.call(RequestCode.PEEK_MESSAGE, header, version=V5)
            refused(answer, 16, "retry topics cannot be popped")

    async def test_a_group_that_pops_gets_no_messages_that_another_group_sent_back(self, peer, consumer):
        for topic in ("c", "b_c"):
            await create(peer, topic)
        await create(peer, "%RETRY%a_b_c", 1, 1)
        await peer.send("%RETRY%a_b_c", b"of c", 0, {"RETRY_TOPIC": "c"})
        assert (await consumer.pop(consumer_group="a", topic="b_c")).code == 210
        assert (await consumer.pop(consumer_group="a_b", topic="c")).bodies == ["of c"]

    async def test_a_renewed_lease_lasts_and_keeps_its_handle(self, cluster, peer, consumer):
        await peer.send(body=b"1")
        found = await consumer.pop(invisible_ms=3_000)
        (handle,) = found.handles
        answer = await consumer.renew(handle, 60_000)
        assert answer.code == 0
        assert answer.ext["popTime"] == str(handle.pop_time_ms)
        assert int(answer.ext["invisibleTime"]) >= 60_000
        lease = cluster.broker.parts.pops.leases.find(("G", "Orders", 0)).leases[0]
        assert lease.deadline_ms > 3_000
        assert await consumer.ack(handle) == 0
        assert (await consumer.renew(handle, 60_000)).code == 208

    async def test_a_message_given_back_comes_again(self, peer, consumer):
        await peer.send(body=b"1")
        (handle,) = (await consumer.pop()).handles
        assert (await consumer.renew(handle, 0)).code == 0
        again = await consumer.pop_until(5)
        assert (again.bodies, again.messages[0].reconsume_times) == (["1"], 1)
        assert (await consumer.renew(again.handles[0], 0, suspend=True)).code == 0
        assert (await consumer.pop_until(5)).messages[0].reconsume_times == 1

    async def test_a_message_that_fails_too_often_becomes_a_dead_letter(self, cluster, peer, consumer):
        await peer.set_group(b'{"groupName":"G","retryMaxTimes":1}')
        await peer.send(body=b"1")
        for _ in range(2):
            (handle,) = (await consumer.pop_until(5)).handles
            await consumer.renew(handle, 0)
        (dead,) = await take(peer, "%DLQ%G", 1)
        assert (dead.body, dead.properties["RETRY_TOPIC"], dead.reconsume_times) == (b"1", "Orders", 2)
        assert offset_in(cluster, topic=RETRY_TOPIC) == 1

    async def test_properties_that_leave_no_room_for_those_of_a_retry(self, cluster, peer, consumer):
        await peer.set_group(b'{"groupName":"G","retryMaxTimes":1}')
        assert (await peer.send(properties={"big": "x" * 32_720})).code == 0
        assert len((await consumer.pop(invisible_ms=1)).messages) == 1
        (again,) = (await consumer.pop_until(3, invisible_ms=1)).messages
        assert (len(again.properties["big"]), again.reconsume_times) == (32_720, 1)
        (dead,) = await take(peer, "%DLQ%G", 1)
        assert len(dead.properties["big"]) == 32_720

    async def test_a_damaged_message_is_not_copied(self, cluster, peer, consumer, monkeypatch, caplog):
        """A copy would have a valid checksum of the damaged body."""
        read = Retries._read  # noqa: SLF001 - the damage is between the disk and the copy
        monkeypatch.setattr(Retries, "_read", lambda *given: (read(*given) or b"").replace(b"good", b"evil"))
        await create(peer, read=1, write=1)
        await peer.set_group(b'{"groupName":"G"}')
        await peer.send(body=b"good")
        await consumer.pop(invisible_ms=1)
        await until(lambda: offset_in(cluster) == 1)
        assert "is damaged" in caplog.text
        assert cluster.broker.parts.store.max_offset(RETRY_TOPIC, 0) == 0

    async def test_leases_expire_although_their_pop_has_failed_in_another_queue(
        self, cluster, peer, consumer, monkeypatch, caplog
    ):
        await create(peer, read=2, write=2)
        for queue_id in range(2):
            await peer.send(body=b"1", queue_id=queue_id)
        read = Pops._read  # noqa: SLF001 - one queue cannot be read

        def fail_once(pops, request, *given):
            if request.found:
                monkeypatch.setattr(Pops, "_read", read)
                raise OSError("unreadable")
            return read(pops, request, *given)

        monkeypatch.setattr(Pops, "_read", fail_once)
        assert (await consumer.pop(invisible_ms=1)).bodies == ["1"]
        assert "unreadable" in caplog.text
        await until(lambda: cluster.broker.parts.store.max_offset(RETRY_TOPIC, 0) == 1)

    async def test_a_batch_of_acks(self, cluster, peer, consumer):
        await peer.send_numbers(6)
        found = await consumer.pop()
        body = BatchAckMessageRequestBody("broker-a", pack_acks("G", "Orders", found.handles[1:4]))
        assert (await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, body.encode(), version=V5)).code == 0
        assert offset_in(cluster) == 0
        body = BatchAckMessageRequestBody("broker-a", pack_acks("G", "Orders", found.handles[:1]))
        await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, body.encode(), version=V5)
        assert offset_in(cluster) == 4

    async def test_a_change_of_the_offset_by_another_request_counts(self, cluster, peer, consumer):
        await peer.send_numbers(4)
        found = await consumer.pop(2)
        cluster.broker.parts.tables.offsets.commit("G", "Orders", 0, 1)
        assert await consumer.ack(found.handles[0]) == 208
        assert (await consumer.pop()).bodies == ["1", "2", "3"]

    async def test_leases_survive_no_kill_but_their_messages_do(self, tmp_path):
        async with running(tmp_path) as (broker, peer):
            consumer = PopClient(peer)
            await peer.send_numbers(4)
            found = await consumer.pop()
            await consumer.ack(found.handles[0])
            await consumer.ack(found.handles[2])
            broker.parts.pops.leases.clear()  # What a kill leaves is the stored offset
            assert (await consumer.pop()).bodies == ["1", "2", "3"]


class TestOrdered:
    async def test_a_queue_yields_nothing_while_messages_are_leased(self, cluster, peer, consumer):
        await peer.send_numbers(3)
        first = await consumer.pop(2, order=True)
        assert (first.bodies, first.answer.ext["reviveQid"]) == (["0", "1"], "999")
        assert first.counts == {(TopicKind.NORMAL, 0, None): 0}
        assert (await consumer.pop(order=True)).code == 210
        waiting = asyncio.create_task(consumer.pop(order=True, hold_ms=20_000))
        await until(lambda: len(cluster.broker.parts.pops.pops.polls))
        for handle in first.handles:
            assert await consumer.ack(handle) == 0
        assert (await waiting).bodies == ["2"]

    async def test_expired_messages_come_again_in_place(self, cluster, peer, consumer):
        await peer.send_numbers(3)
        first = await consumer.pop(2, order=True, invisible_ms=10)
        again = await consumer.pop_until(5, order=True)
        assert again.bodies == ["0", "1", "2"]
        assert again.counts == {
            (TopicKind.NORMAL, 0, 0): 1, (TopicKind.NORMAL, 0, 1): 1, (TopicKind.NORMAL, 0, None): 0,
        }  # fmt: skip
        assert await consumer.ack(first.handles[0]) == 208
        assert await consumer.ack(again.handles[0]) == 0
        assert offset_in(cluster) == 1

    async def test_a_repeated_attempt_receives_the_same_messages(self, peer, consumer):
        await peer.send_numbers(2)
        first = await consumer.pop(order=True, attempt_id="one")
        assert (await consumer.pop(order=True, attempt_id="two")).code == 210
        again = await consumer.pop(order=True, attempt_id="one")
        assert (again.bodies, again.counts) == (first.bodies, first.counts)


class TestRefusals:
    async def test_a_full_disk_delays_a_retry_but_loses_nothing(self, cluster, peer, consumer, monkeypatch):
        from cometmq.broker.pop import expiry
        from cometmq.store import Flag

        monkeypatch.setattr(expiry, "POSTPONED_MS", 20)
        await peer.send(body=b"1")
        flags = cluster.broker.parts.store.flags
        flags.raise_flag(Flag.DISK_FULL, "test")
        await consumer.pop(invisible_ms=10)
        assert (await consumer.pop(hold_ms=300)).code == 210
        assert offset_in(cluster) == 0
        flags.clear(Flag.DISK_FULL)
        assert (await consumer.pop_until(5)).bodies == ["1"]

    @pytest.mark.parametrize(
        ("header", "code", "words"),
        [
            ({"topic": "Unknown"}, 17, "topic[Unknown] not exist"),
            ({"queue_id": 9}, 29, "queueId[9] is illegal"),
            ({"count": 33}, 29, "greater than 32"),
            ({"count": 0}, 29, "maxMsgNums is 0"),
            ({"invisible_ms": -1}, 29, "invisibleTime is -1"),
            ({"invisible_ms": 1 << 40}, 29, "invisibleTime is"),
            ({"consumer_group": "g" * 120}, 29, "use a shorter topic or group"),
            ({"attempt_id": "x" * 257}, 29, "attemptId has 257 characters"),
            ({"exp": "||"}, 23, "parse the consumer's subscription failed"),
        ],
    )
    async def test_bad_pops(self, peer, consumer, header, code, words):
        await create(peer)
        refused((await consumer.pop(**header)).answer, code, words)

    async def test_a_group_without_permission(self, peer, consumer):
        await create(peer)
        await peer.set_group(b'{"groupName":"G","consumeEnable":false}')
        refused((await consumer.pop()).answer, 16, "subscription group no permission")

    async def test_bad_acks(self, peer, consumer):
        await peer.send()
        (handle,) = (await consumer.pop()).handles
        assert await consumer.ack(handle, topic="Unknown") == 17
        assert await consumer.ack(handle, queue_id=9) == 13
        assert await consumer.ack(handle, offset=5) == 208
        assert await consumer.ack(handle, extra_info="x") == 13
        assert await consumer.ack(handle._replace(pop_time_ms=handle.pop_time_ms + 1)) == 208
        other = handle._replace(broker_name="broker-b")
        assert await consumer.ack(other) == 208
        refused(await consumer.renew(other, 1_000), 208, "of broker broker-b, not broker-a")
        body = BatchAckMessageRequestBody("broker-b", pack_acks("G", "Orders", [handle])).encode()
        refused(await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, body, version=V5), 208, "broker-b")
        assert (await consumer.renew(handle, -1)).code == 29
        assert await consumer.ack(handle) == 0
        assert await consumer.ack(handle) == 208
        bad = b'{"acks":[{"c":"G","t":"Orders","r":"7","b":"AQ=="}]}'
        refused(await peer.call(RequestCode.BATCH_ACK_MESSAGE, None, bad, version=V5), 13, "not 0, 1 or 2")

    async def test_a_slave_neither_pops_nor_acks(self, cluster, peer, consumer):
        await peer.send_numbers(2)
        (handle,) = (await consumer.pop(1)).handles
        waiting = asyncio.create_task(consumer.pop(exp="none", exp_type="TAG", hold_ms=20_000))
        pops = cluster.broker.parts.pops.pops
        await until(lambda: len(pops.polls))
        cluster.broker.parts.store.slave = True
        try:
            refused((await consumer.pop()).answer, 1, "this broker is a slave")
            assert await consumer.ack(handle) == 1
            assert (await consumer.renew(handle, 1)).code == 1
            pops.wake(pops.polls.wake_all())
            assert (await waiting).code == 210
        finally:
            cluster.broker.parts.store.slave = False
        assert offset_in(cluster) == 0

    async def test_nothing_to_roll_back(self, peer):
        assert (await peer.call(RequestCode.POP_ROLLBACK)).code == 0
