"""Lite topics: sends, subscriptions, pops in order, retries in place, dead letters, quotas, removal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, V5, LiteClient, lite_of, set_group, set_up
from tests.broker.rates.conftest import stopped_clock
from tests.kit.brokers import Cluster, Peer, StartCluster, create, records, refused, running, store_raw
from tests.kit.waiting import until

from cometmq import logs
from cometmq.broker.lite import pops, service
from cometmq.protocol.bodies import LiteSubscriptionCtlRequestBody, OffsetOption
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers.admin import TriggerLiteDispatchHeader
from cometmq.protocol.lite import lmq_name
from cometmq.protocol.record.one import iter_records
from cometmq.store import truncate_log
from cometmq.store.inspect.rebuild import rebuild

QUOTA = 2018
LIGHT = lmq_name(PARENT, "s1")


async def test_a_message_reaches_the_subscribers_of_its_lite_topic(client: LiteClient) -> None:
    await client.subscribe("s1")
    await client.send("s1", "for s1")
    await client.send("s2", "for s2")
    popped = await client.pop(hold_ms=20_000)
    assert popped.bodies == ["for s1"]
    (message,) = popped.messages
    assert message.topic == PARENT
    assert message.properties["INNER_MULTI_DISPATCH"] == LIGHT
    assert message.properties["INNER_MULTI_QUEUE_OFFSET"] == "0"
    assert popped.counts == [0]
    assert await client.ack(popped) == 0
    assert (await client.pop()).code == 210
    await client.subscribe("s2")  # A new group begins with the first message
    assert await client.take(1) == ["for s2"]


@pytest.mark.parametrize(
    "more", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "10"}, {"TRAN_MSG": "true", "PGROUP": "P"}]
)
async def test_a_producer_cannot_choose_the_offset_of_its_message(
    client: LiteClient, cluster: Cluster, more: dict[str, str]
) -> None:
    """With a chosen offset, it would replace the message of another producer."""
    forged = {"INNER_MULTI_DISPATCH": LIGHT, "INNER_MULTI_QUEUE_OFFSET": "0", **more}
    await client.peer.send(PARENT, b"evil", 0, forged, version=V5)
    store = cluster.broker.parts.store
    (record,) = (
        record
        for topic in cluster.broker.parts.tables.topics.table
        for record in iter_records(b"".join(store.get_messages(topic, 0, 0, 1).buffers))
    )
    assert record.body == b"evil"
    assert not [name for name in record.properties if name.startswith("INNER_MULTI")]


@pytest.mark.parametrize(
    "more", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "10"}, {"TRAN_MSG": "true", "PGROUP": "P"}]
)
async def test_a_message_of_a_lite_topic_that_would_not_be_stored_there_is_refused(
    client: LiteClient, more: dict[str, str]
) -> None:
    refused(await client.send("s1", "late", **more), 13, "cannot have a delivery time")


async def test_a_refused_message_leaves_no_lite_topic_in_memory(client: LiteClient, cluster: Cluster) -> None:
    too_long = ["x" * (cluster.broker.config.store.max_message_size + 1)] * 3
    await asyncio.gather(*(client.send("s1", body) for body in too_long))
    queues = lite_of(cluster).queues
    assert (queues.count, queues.is_known(LIGHT)) == (0, False)
    await client.send("s1", "1")
    await asyncio.gather(client.send("s1", *too_long), client.send("s1", "2"))
    assert (queues.end(LIGHT), queues.remove(LIGHT)) == (2, True)


async def test_a_waiting_pop_is_woken(client: LiteClient) -> None:
    await client.subscribe("s1")
    waiting = asyncio.create_task(client.pop(hold_ms=20_000))
    await client.send("s1", "woken")
    assert (await waiting).bodies == ["woken"]


async def test_a_lite_topic_is_blocked_while_a_message_is_leased(client: LiteClient) -> None:
    await client.send("s1", "1", "2")
    await client.send("s2", "other")
    await client.subscribe("s1", "s2")
    first = await client.pop()
    assert first.bodies == ["1", "other"]
    assert (await client.pop()).code == 210
    assert await client.ack(first, 0) == 0
    assert (await client.pop(hold_ms=20_000)).bodies == ["2"]


async def test_an_ordered_group_receives_several_messages_at_once(client: LiteClient, peer: Peer) -> None:
    await set_group(peer, orderly=True)
    await client.send("s1", "1", "2", "3")
    await client.subscribe("s1")
    first = await client.pop(2)
    assert first.bodies == ["1", "2"]
    assert await client.ack(first, 1) == 0  # The queue stays blocked by the first message
    assert (await client.pop()).code == 210
    assert await client.ack(first, 0) == 0
    assert (await client.pop(hold_ms=20_000)).bodies == ["3"]


async def test_an_expired_message_is_delivered_again_in_its_place(client: LiteClient) -> None:
    await client.send("s1", "1", "2")
    await client.subscribe("s1")
    first = await client.pop(invisible_ms=60_000)
    assert await client.renew(first, 0) == 0
    again = await client.pop(hold_ms=20_000)
    assert (again.bodies, again.counts) == (["1"], [1])
    assert await client.ack(first) == 208
    assert await client.renew(again, 0, suspend=True) == 0  # Given back without counting a delivery
    third = await client.pop(hold_ms=20_000)
    assert (third.bodies, third.counts) == (["1"], [1])


async def test_a_message_that_fails_too_often_becomes_a_dead_letter(client: LiteClient, peer: Peer) -> None:
    await client.send("s1", "poison", "good")
    await client.subscribe("s1")
    for times in range(3):  # retryMaxTimes is 2
        popped = await client.pop(hold_ms=20_000)
        assert (popped.bodies, popped.counts) == (["poison"], [times])
        assert await client.renew(popped, 0) == 0
    assert await client.take(1) == ["good"]
    (dead,) = records(await peer.pull(f"%DLQ%{GROUP}"))
    assert dead.body == b"poison"


async def test_a_repeated_attempt_receives_its_messages_once_more(client: LiteClient) -> None:
    await client.send("s1", "1")
    await client.subscribe("s1")
    assert (await client.pop(attempt_id="a1")).bodies == ["1"]
    again = await client.pop(attempt_id="a1", hold_ms=20_000)
    assert (again.bodies, again.counts) == (["1"], [0])
    assert (await client.pop(attempt_id="a2")).code == 210


async def test_members_of_a_group_share_lite_topics_and_groups_do_not(
    client: LiteClient, cluster: Cluster
) -> None:
    other = LiteClient(cluster.peer(), "c2")
    await client.subscribe("s1")
    await other.subscribe("s1")
    waiting = asyncio.create_task(other.pop(hold_ms=20_000))
    await until(lambda: len(lite_of(cluster).pops.polls))
    await client.send("s1", "shared")
    assert (await waiting).bodies == ["shared"]
    assert (await client.pop()).code == 210


async def test_an_exclusive_group_has_one_subscriber(
    client: LiteClient, cluster: Cluster, peer: Peer
) -> None:
    await set_group(peer, sub_model="Exclusive")
    other = LiteClient(cluster.peer(), "c2")
    await client.subscribe("s1")
    await other.subscribe("s1")
    notice = await peer.notice(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)
    assert notice.ext == {"liteTopic": "s1", "consumerGroup": GROUP, "clientId": "c1"}
    await client.send("s1", "1")
    assert (await client.pop()).code == 210
    assert await other.take(1) == ["1"]
    # A client that repeats a subscription that it has lost is notified once more.
    assert (await client.change("COMPLETE_ADD", "s1", "s2")).code == 0
    assert (await peer.notice(RequestCode.NOTIFY_UNSUBSCRIBE_LITE)).ext == notice.ext
    await client.send("s2", "2")
    assert await client.take(1) == ["2"]


async def test_complete_actions_replace_and_remove_subscriptions(
    client: LiteClient, cluster: Cluster
) -> None:
    await client.subscribe("s1", "s2")
    assert (await client.change("COMPLETE_ADD", "s2", "s3")).code == 0
    subscriptions = lite_of(cluster).subscriptions
    assert subscriptions.find("c1", GROUP).lmqs == {lmq_name(PARENT, each) for each in ("s2", "s3")}
    assert (await client.change("PARTIAL_REMOVE", "s2", "unknown")).code == 0
    assert subscriptions.count == 1
    assert (await client.change("COMPLETE_REMOVE")).code == 0
    assert subscriptions.count == 0
    assert subscriptions.find("c1", GROUP) is None


async def test_the_quota_of_a_client_counts_net_growth(
    client: LiteClient, cluster: Cluster, peer: Peer
) -> None:
    await set_group(peer, sub_client_quota="2")
    await client.subscribe("s1", "s2")
    refused(await client.change("PARTIAL_ADD", "s3"), QUOTA, "the quota of the client is 2")
    refused(await client.change("COMPLETE_ADD", "s3", "s4", "s5"), QUOTA, "3 lite topics")
    assert lite_of(cluster).subscriptions.count == 2  # All or nothing
    await client.subscribe("s1", "s2")  # Repetitions pass
    assert (await client.change("COMPLETE_ADD", "s3", "s4")).code == 0  # So does a replacement
    await set_group(peer, sub_client_quota="1")
    assert (await client.change("COMPLETE_ADD", "s3", "s4")).code == 0
    assert (await client.change("PARTIAL_REMOVE", "s3")).code == 0


async def test_the_number_of_lite_topics_is_limited(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(maxLmqConsumeQueueNum="2")
    peer = cluster.peer()
    await set_up(peer)
    client = LiteClient(peer)
    await client.send("s1", "1")
    await client.send("s2", "1")
    refused(await client.send("s3", "1"), 2017, "there are 2, at most 2")
    assert (await client.send("s1", "2")).code == 0


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (None, ["1", "2", "3"]),
        (OffsetOption("POLICY", 0), ["1", "2", "3"]),
        (OffsetOption("POLICY", 1), ["1", "2", "3"]),
        (OffsetOption("POLICY", 2), ["new"]),
        (OffsetOption("OFFSET", 2), ["3"]),
        (OffsetOption("OFFSET", 1 << 60), ["new"]),
        (OffsetOption("OFFSET", -5), ["1", "2", "3"]),
        (OffsetOption("TAIL_N", 1), ["1", "2", "3"]),  # Has no effect without a stored offset
        (OffsetOption("TIMESTAMP", 5), ["1", "2", "3"]),  # Has no effect, as in Apache's broker
        (OffsetOption("bogus", 5), ["1", "2", "3"]),
    ],
    ids=str,
)
async def test_a_subscription_may_set_the_offset(
    client: LiteClient, option: OffsetOption | None, expected: list[str]
) -> None:
    await client.send("s1", "1", "2", "3")
    await client.subscribe("s1", offset_option=option)
    await client.send("s1", "new")
    assert (await client.take(1)) == expected[:1]


async def test_a_stored_offset_may_be_set_back(client: LiteClient) -> None:
    await client.send("s1", "1", "2", "3")
    await client.subscribe("s1")
    assert await client.take(3) == ["1", "2", "3"]
    await client.subscribe("s1", offset_option=OffsetOption("TAIL_N", 2))
    assert await client.take(2) == ["2", "3"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"lite_topic_set": ["a b"]}, 29, "'a b' is not the name of a lite topic"),
        ({"lite_topic_set": ["x" * 65]}, 29, "is not the name of a lite topic"),
        ({"lite_topic_set": ["a$b"]}, 29, "is not the name of a lite topic"),
        ({"lite_topic_set": [""]}, 29, "is not the name of a lite topic"),
        ({"action": "BOGUS"}, 604, "action 'BOGUS' is unknown"),
        ({"client_id": ""}, 29, "clientId has 0 characters"),
        ({"client_id": "x" * 600}, 29, "clientId has 600 characters"),
        ({"group": "unbound"}, 29, "its attribute lite.bind.topic must be Sessions"),
        ({"topic": "Orders"}, 29, "its attribute message.type must be LITE"),
        ({"topic": "Unknown"}, 17, "not exist"),
        ({"group": "a b"}, 29, "illegal characters"),
    ],
    ids=str,
)
async def test_invalid_subscriptions_are_refused(
    client: LiteClient, peer: Peer, cluster: Cluster, change: dict[str, Any], code: int, words: str
) -> None:
    await create(peer)
    names = change.pop("lite_topic_set", ["s1"])
    action = change.pop("action", "PARTIAL_ADD")
    answer = await client.change(action, *names, **change)
    assert (answer.code, words in (answer.remark or "")) == (code, True), (answer.code, answer.remark)
    assert lite_of(cluster).subscriptions.count == 0


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"subscriptionSet":[]}', b'{"subscriptionSet":7}'])
async def test_malformed_subscription_requests_are_refused(client: LiteClient, body: bytes) -> None:
    answer = await client.peer.call(RequestCode.LITE_SUBSCRIPTION_CTL, None, body, version=V5)
    assert answer.code in (1, 604)
    many = LiteSubscriptionCtlRequestBody.decode(b'{"subscriptionSet":[' + b"{}," * 64 + b"{}]}").encode()
    answer = await client.peer.call(RequestCode.LITE_SUBSCRIPTION_CTL, None, many, version=V5)
    refused(answer, 604, "65 entries")


@pytest.mark.parametrize("name", ["a b", "x" * 65, "a$b", "ä", "../x", "%LMQ%"])
async def test_sends_to_invalid_lite_topics_are_refused(client: LiteClient, name: str) -> None:
    refused(await client.send(name, "1"), 13, "lite topic")


async def test_a_sender_cannot_set_the_offset_in_a_lite_topic(client: LiteClient, cluster: Cluster) -> None:
    await client.subscribe("s1")
    forged = {"INNER_MULTI_DISPATCH": LIGHT, "INNER_MULTI_QUEUE_OFFSET": "77"}
    await client.send("s1", "1", **forged)
    await client.peer.send(PARENT, b"without", 0, forged, version=V5)
    assert await client.take(1) == ["1"]
    assert lite_of(cluster).queues.end(LIGHT) == 1


@pytest.mark.parametrize(
    "properties",
    [
        b"INNER_MULTI_DISPATCH\x01%LMQ%$Sessions$s1\x02INNER_MULTI_QUEUE_OFFSET\x01999999999",
        b"INNER_MULTI_DISPATCH\x01%LMQ%$Sessions$s1\x02INNER_MULTI_QUEUE_OFFSET\x01" + b"9" * 400,
        b"INNER_MULTI_DISPATCH\x01%LMQ%$Sessions$s1\x02INNER_MULTI_QUEUE_OFFSET\x01-1",
        b"INNER_MULTI_DISPATCH\x01%LMQ%$Other$s1\x02INNER_MULTI_QUEUE_OFFSET\x010",
        b"INNER_MULTI_DISPATCH\x01%LMQ%$Sessions$s 1\x02INNER_MULTI_QUEUE_OFFSET\x010",
        b"INNER_MULTI_DISPATCH\x01\xff\xfe\x02INNER_MULTI_QUEUE_OFFSET\x010",
        b"INNER_MULTI_QUEUE_OFFSET\x010",
    ],
    ids=repr,
)
async def test_records_with_strange_properties_are_left_out(
    client: LiteClient, cluster: Cluster, properties: bytes
) -> None:
    await client.subscribe("s1")
    store_raw(cluster, PARENT, properties)
    await client.send("s1", "good")
    assert await client.take(1) == ["good"]
    assert lite_of(cluster).queues.count == 1


async def test_batches_to_a_parent_topic_are_refused(client: LiteClient) -> None:
    answer = await client.peer.send(PARENT, b"", batch=True, version=V5)
    refused(answer, 13, "batches are not supported by Sessions")


async def test_pops_are_checked(client: LiteClient, peer: Peer) -> None:
    await create(peer)
    for header, code in (
        ({"max_msg_num": 33}, 29),
        ({"max_msg_num": 0}, 29),
        ({"invisible_time": -1}, 29),
        ({"topic": "Orders"}, 29),
        ({"topic": "Unknown"}, 17),
        ({"client_id": "x" * 600}, 29),
        ({"consumer_group": "unbound"}, 29),
    ):
        assert (await client.pop(**header)).code == code, header


async def test_acks_are_checked(client: LiteClient) -> None:
    await client.send("s1", "1")
    await client.subscribe("s1")
    popped = await client.pop()
    for more, code in (
        ({"offset": 1}, 208),
        ({"offset": -1}, 208),
        ({"lite_topic": "other"}, 208),
        ({"lite_topic": "a b"}, 29),
        ({"extra_info": "nonsense"}, 13),
        ({"topic": "Unknown"}, 17),
    ):
        assert await client.ack(popped, **more) == code, more
    assert await client.ack(popped) == 0
    assert await client.ack(popped) != 0


async def test_a_dispatch_on_request_offers_lite_topics_once_more(
    client: LiteClient, cluster: Cluster, peer: Peer
) -> None:
    await client.subscribe("s1", "s2")
    await client.send("s1", "1")
    await client.send("s2", "2")
    (subscriber,) = lite_of(cluster).subscriptions
    subscriber.ready.clear()
    for fields in ({"client_id": "other"}, {"client_id": "c1"}, {}):
        header = TriggerLiteDispatchHeader(group=GROUP, **fields)
        assert (await peer.call(RequestCode.TRIGGER_LITE_DISPATCH, header)).code == 0
        assert len(subscriber.ready) == (0 if fields == {"client_id": "other"} else 2)
        subscriber.ready.clear()


# -- removal


async def test_silent_lite_topics_are_removed(client: LiteClient, cluster: Cluster, peer: Peer) -> None:
    await client.subscribe("s1")
    await client.send("s1", "1")
    await client.send("s2", "1")
    assert await client.take(1) == ["1"]
    lite = lite_of(cluster)
    await lite.remove_silent(PARENT, 0)
    assert lite.queues.count == 2
    await lite.remove_silent(PARENT, 1 << 60)
    assert lite.queues.count == 0
    await client.send("s1", "again")
    assert lite.queues.end(LIGHT) == 1
    assert await client.take(1) == ["again"]


async def test_messages_before_the_log_are_removed(client: LiteClient, cluster: Cluster) -> None:
    lite = lite_of(cluster)
    await client.send("s1", "1", "2")
    (_, first), (_, second) = lite.queues.units(LIGHT, 0, 9, 0)
    assert lite.queues.units(LIGHT, 0, 9, second) == [(1, second)]
    lite.queues.flush()
    assert lite.queues.expired(first, 9) == []
    assert lite.queues.expired(second, 9) == [LIGHT]
    lite.queues.cut(LIGHT, second)
    assert lite.queues.units(LIGHT, 0, 9, 0) == [(1, second)]
    lite.queues.cut(LIGHT, second + 1)
    assert lite.queues.count == 0


async def test_more_expired_lite_topics_than_one_check_removes(
    client: LiteClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite = lite_of(cluster)
    for number in range(3):
        await client.send(f"s{number}", "1")
    monkeypatch.setattr(service, "REMOVED_PER_CHECK", 2)
    monkeypatch.setattr(type(lite.store.log), "min_position", 1 << 40)
    await lite.check()
    assert lite.queues.count == 1
    await lite.check()
    assert lite.queues.count == 0


async def test_a_pop_that_fails_again_and_again_does_not_fill_the_log(
    client: LiteClient, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    await client.subscribe("s1")
    lite = lite_of(cluster)
    lite.queues.units = fail
    lite.pops._log_limit = logs.LogLimiter(1, 3_600)  # noqa: SLF001
    for _ in range(3):
        await client.send("s1", "1")
        assert (await client.pop()).code == 210
    assert len([each for each in caplog.records if each.message.startswith("pop from lite")]) == 1


async def test_a_clock_that_is_set_back_blocks_no_lite_topic(client: LiteClient, cluster: Cluster) -> None:
    await client.subscribe("s1")
    await client.send("s1", "1")
    first = await client.pop(invisible_ms=1)
    leases = lite_of(cluster).leases
    await until(lambda: not len(leases))
    (queue,) = leases
    queue.pop_ms += 3_600_000  # As if the first pop had been an hour later
    again = await client.pop(hold_ms=20_000)
    assert (first.bodies, again.bodies, again.counts) == (["1"], ["1"], [1])
    assert await client.ack(first) == 208
    assert await client.ack(again) == 0


async def test_a_lite_topic_that_could_not_be_read_is_read_once_more(
    client: LiteClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pops, "FAILED_S", 0.01)
    await client.subscribe("s1")
    queues = lite_of(cluster).queues
    units = queues.units

    def fail_once(*_: object) -> None:
        queues.units = units
        raise OSError("an error of the disk")

    queues.units = fail_once
    await client.send("s1", "1")
    assert (await client.pop()).code == 210
    assert await client.take(1) == ["1"]


async def test_subscriptions_end_if_the_group_is_bound_to_another_topic(
    client: LiteClient, cluster: Cluster, peer: Peer
) -> None:
    await client.subscribe("s1", "s2")
    await create(peer, "Other", attributes="+message.type=LITE", version=V5)
    await set_group(peer, bind_topic="Other")
    await client.subscribe("s1", topic="Other")
    assert lite_of(cluster).queues.subscriptions() == [("c1", GROUP, "Other", lmq_name("Other", "s1"))]


async def test_a_deleted_parent_takes_its_lite_topics_along(
    client: LiteClient, cluster: Cluster, peer: Peer
) -> None:
    await client.send("s1", "1")
    await client.send("s2", "2")
    assert (await peer.delete_topic(PARENT)).code == 0
    await until(lambda: lite_of(cluster).queues.count == 0)
    await set_up(peer)
    await until(lambda: lite_of(cluster).parent_queues.is_ready(PARENT))
    await client.subscribe("s1")
    await client.send("s1", "anew")
    assert await client.take(1) == ["anew"]


# -- restarts


async def test_offsets_and_subscriptions_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, peer):
        await set_up(peer)
        client = LiteClient(peer)
        await client.subscribe("s1")
        await client.send("s1", "1", "2")
        assert await client.take(1) == ["1"]
    async with running(tmp_path) as (broker, peer):
        client = LiteClient(peer)
        assert await client.take(1) == ["2"]  # Without a new subscription
        await client.send("s1", "3")
        assert await client.take(1) == ["3"]
        assert broker.parts.lite.queues.end(LIGHT) == 3


@pytest.mark.parametrize("damage", ["missing", "garbage", "empty"])
async def test_a_lost_database_is_read_from_the_log(tmp_path: Path, damage: str) -> None:
    async with running(tmp_path) as (_, peer):
        await set_up(peer)
        client = LiteClient(peer)
        for number in range(200):
            await client.send(f"s{number % 5}", str(number), queue_id=number % 2)
    path = tmp_path / "config" / "liteTopics.db"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"garbage" * 1000 if damage == "garbage" else b"")
    async with running(tmp_path) as (broker, peer):
        lite = broker.parts.lite
        await until(lambda: lite.parent_queues.is_ready(PARENT))
        assert lite.queues.count == 5
        client = LiteClient(peer)
        await client.subscribe("s3")
        found = await client.take(40)
        assert sorted(map(int, found)) == list(range(3, 200, 5))


@pytest.mark.parametrize("tool", ["rebuild", "truncate"])
async def test_lite_topics_after_a_change_of_the_store(tmp_path: Path, tool: str) -> None:
    async with running(tmp_path) as (broker, peer):
        await set_up(peer)
        client = LiteClient(peer)
        await client.send("s1", "1", "2", "3", "4")
        await client.subscribe("s1")
        assert await client.take(3) == ["1", "2", "3"]
        position = broker.parts.lite.queues.units(LIGHT, 1, 1, 0)[0][1]
    if tool == "rebuild":
        rebuild(str(tmp_path))
    else:
        assert truncate_log(str(tmp_path), position).done  # Three messages are removed
    async with running(tmp_path) as (broker, peer):
        client = LiteClient(peer)
        await client.send("s1", "5")
        expected = ["4", "5"] if tool == "rebuild" else ["5"]
        assert await client.take(len(expected)) == expected
        assert broker.parts.lite.queues.end(LIGHT) == (5 if tool == "rebuild" else 2)


async def test_a_broker_without_lite_topics_opens_no_database(cluster: Cluster, tmp_path: Path) -> None:
    assert not lite_of(cluster).is_open
    answer = await LiteClient(cluster.peer()).pop()
    assert answer.code == 17


async def test_a_group_receives_lite_messages_at_its_rate(client: LiteClient, cluster: Cluster) -> None:
    clock, rates = stopped_clock(cluster), cluster.broker.parts.rates
    cluster.broker.parts.config.update({"maxGroupReceiveMessagesPerSecond": "2"})
    cluster.broker.parts.rates.configure()
    await client.subscribe("s1", "s2", "s3")
    for number in range(1, 4):
        await client.send(f"s{number}", str(number))
    first = await client.pop()
    assert len(first.bodies) == 2
    waiting = asyncio.create_task(client.pop(hold_ms=60_000))
    await until(lambda: rates.delayed_receives == {(GROUP, "group"): 1})
    clock.advance(0.5)
    assert len((await waiting).bodies) == 1
