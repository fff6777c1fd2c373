"""Consumers of lite topics: settings, subscriptions, receives, acks, dead letters, notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, V5, set_group, set_up
from tests.grpc.service.caller import Caller, consumer_settings, message
from tests.grpc.serving import M
from tests.kit.brokers import Cluster, create, records
from tests.kit.waiting import until

from cometmq.grpc.rpc.enums import ClientType, Code, LiteSubscriptionAction, MessageType
from cometmq.grpc.service import receives
from cometmq.grpc.service.delivered import Popped, popped_messages
from cometmq.protocol.frame import Frame
from cometmq.protocol.lite import lmq_name

ADD, REMOVE, ALL = (
    LiteSubscriptionAction.PARTIAL_ADD,
    LiteSubscriptionAction.PARTIAL_REMOVE,
    LiteSubscriptionAction.COMPLETE_ADD,
)


class LiteCaller:
    """A consumer of the lite topics of one parent topic."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def send(self, lite_topic: str, body: bytes) -> Any:
        return await self.caller.send(message(PARENT, body, lite_topic=lite_topic, message_id=body.decode()))

    async def sync(self, action: int, *lite_topics: str, **more: Any) -> Any:
        request = M.SyncLiteSubscriptionRequest(
            action=action,
            topic=M.Resource(name=more.pop("topic", PARENT)),
            group=M.Resource(name=GROUP),
            lite_topic_set=lite_topics,
            **more,
        )
        return (await self.caller.call("SyncLiteSubscription", request)).status

    async def subscribe(self, *lite_topics: str) -> None:
        status = await self.sync(ADD, *lite_topics)
        assert status.code == Code.OK, status

    async def receive(self, **more: Any) -> list[Any]:
        return await self.caller.receive(PARENT, GROUP, **{"poll_s": 20, **more})

    async def ack(self, received: Any) -> int:
        system = received.system_properties
        entry = M.AckMessageEntry(
            message_id=system.message_id, receipt_handle=system.receipt_handle, lite_topic=system.lite_topic
        )
        request = M.AckMessageRequest(
            group=M.Resource(name=GROUP), topic=M.Resource(name=PARENT), entries=[entry]
        )
        return int((await self.caller.call("AckMessage", request)).status.code)

    async def change(self, received: Any, seconds: float) -> int:
        system = received.system_properties
        request = M.ChangeInvisibleDurationRequest(
            group=M.Resource(name=GROUP),
            topic=M.Resource(name=PARENT),
            receipt_handle=system.receipt_handle,
            message_id=system.message_id,
            lite_topic=system.lite_topic,
        )
        request.invisible_duration.FromMilliseconds(int(seconds * 1000))
        return int((await self.caller.call("ChangeInvisibleDuration", request)).status.code)


@pytest.fixture
async def lite(cluster: Cluster, caller: Caller) -> LiteCaller:
    await set_up(cluster.peer())
    return LiteCaller(caller)


async def test_a_consumer_receives_acks_and_gives_back(lite: LiteCaller) -> None:
    await lite.subscribe("s1")
    for body in (b"1", b"2"):
        sent = await lite.send("s1", body)
        assert sent.status.code == Code.OK
    (first,) = await lite.receive()
    system = first.system_properties
    assert (first.body, system.lite_topic, system.message_type) == (b"1", "s1", MessageType.LITE)
    assert (system.delivery_attempt, dict(first.user_properties)) == (1, {})
    assert await lite.receive(poll_s=0) == []
    assert await lite.change(first, 0) == Code.OK
    (again,) = await lite.receive()
    assert (again.body, again.system_properties.delivery_attempt) == (b"1", 2)
    assert await lite.ack(first) == Code.INVALID_RECEIPT_HANDLE
    assert await lite.ack(again) == Code.OK
    (second,) = await lite.receive()
    assert second.body == b"2"


async def test_a_receive_that_ends_gives_its_messages_back(lite: LiteCaller, cluster: Cluster) -> None:
    await lite.subscribe("s1")
    request = lite.caller.receive_request(PARENT, GROUP, poll_s=20)
    call = lite.caller.receiving(request)
    reading = asyncio.create_task(call.read())
    await until(lambda: len(cluster.broker.parts.lite.pops.polls))
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await lite.send("s1", b"1")
    (got,) = await lite.receive()
    assert (got.body, got.system_properties.delivery_attempt) == (b"1", 1)


async def test_a_lease_ends_with_its_parent_topic(lite: LiteCaller, cluster: Cluster) -> None:
    await lite.subscribe("s1")
    await lite.send("s1", b"1")
    (got,) = await lite.receive()
    await cluster.peer().delete_topic(PARENT)
    assert await lite.ack(got) == Code.INVALID_RECEIPT_HANDLE
    assert await lite.change(got, 60) == Code.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize("kind", ["-message.type", "+message.type=NORMAL"])
async def test_a_lease_ends_if_its_topic_is_no_parent_any_more(
    lite: LiteCaller, cluster: Cluster, kind: str
) -> None:
    await lite.subscribe("s1")
    await lite.send("s1", b"1")
    (got,) = await lite.receive()
    assert (await create(cluster.peer(), PARENT, attributes=kind, version=V5)).code == 0
    assert await lite.ack(got) == Code.INVALID_RECEIPT_HANDLE
    assert await lite.change(got, 60) == Code.INVALID_RECEIPT_HANDLE


async def test_messages_go_to_the_dead_letters(lite: LiteCaller, cluster: Cluster) -> None:
    await lite.subscribe("s1")
    await lite.send("s1", b"1")
    (got,) = await lite.receive()
    assert (await lite.caller.dead_letter(got, GROUP)).status.code == Code.OK
    (dead,) = records(await cluster.peer().pull(f"%DLQ%{GROUP}"))
    assert dead.body == b"1"
    assert await lite.receive(poll_s=0) == []


async def test_settings_contain_the_quota(lite: LiteCaller, cluster: Cluster) -> None:
    await set_group(cluster.peer(), sub_client_quota="7")
    stream = lite.caller.telemetry()
    await stream.write(consumer_settings(GROUP, PARENT, ClientType.LITE_PUSH_CONSUMER))
    subscription = (await stream.read()).settings.subscription
    assert (subscription.lite_subscription_quota, subscription.max_lite_topic_size) == (7, 64)
    stream.cancel()


async def test_subscriptions_are_checked(lite: LiteCaller, cluster: Cluster) -> None:
    peer = cluster.peer()
    await create(peer)
    await set_group(peer, sub_client_quota="2")
    await lite.subscribe("s1", "s2")
    for status, code in (
        (await lite.sync(ADD, "s3"), Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED),
        (await lite.sync(ADD, "a b"), Code.ILLEGAL_LITE_TOPIC),
        (await lite.sync(ALL, "x" * 65), Code.ILLEGAL_LITE_TOPIC),
        (await lite.sync(9, "s1"), Code.BAD_REQUEST),
        (await lite.sync(ADD, "s1", topic="Orders"), Code.BAD_REQUEST),
        (await lite.sync(ADD, "s1", topic="a b"), Code.ILLEGAL_TOPIC),
        (await lite.sync(ADD, "s1", topic="Unknown"), Code.TOPIC_NOT_FOUND),
        (await lite.sync(REMOVE, "a b"), Code.OK),
        (await lite.sync(ADD, "s1", offset_option=M.OffsetOption(policy=2)), Code.OK),
        (await lite.sync(ALL, "s4", "s5"), Code.OK),
    ):
        assert status.code == code, (status, code)


async def test_a_name_that_the_python_client_sends_in_pieces_is_put_together(
    cluster: Cluster, connect: Any
) -> None:
    await set_up(cluster.peer())
    python = await connect(cluster, "client-3")
    python.metadata = [("x-mq-client-id", "client-3"), ("x-mq-language", "PYTHON")]
    lite = LiteCaller(python)
    await lite.subscribe(*"session-11")
    found = cluster.broker.parts.lite.subscriptions.find("client-3", GROUP)
    assert found.lmqs == {lmq_name(PARENT, "session-11")}


async def test_sends_are_checked(lite: LiteCaller, cluster: Cluster) -> None:
    await create(cluster.peer(), version=V5)
    for topic, lite_topic, code in (
        (PARENT, "", Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ("Orders", "s1", Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (PARENT, "a b", Code.ILLEGAL_LITE_TOPIC),
        (PARENT, "x" * 65, Code.ILLEGAL_LITE_TOPIC),
    ):
        sent = await lite.caller.send(message(topic, b"body", lite_topic=lite_topic))
        assert sent.status.code == code, (lite_topic, sent)


async def test_a_displaced_client_is_notified(lite: LiteCaller, cluster: Cluster, connect: Any) -> None:
    await set_group(cluster.peer(), sub_model="Exclusive")
    stream = lite.caller.telemetry()
    await stream.write(consumer_settings(GROUP, PARENT, ClientType.LITE_PUSH_CONSUMER))
    await stream.read()
    await lite.subscribe("s1")
    other = LiteCaller(await connect(cluster, "client-2"))
    await other.subscribe("s1")
    command = await stream.read()
    assert command.notify_unsubscribe_lite_command.lite_topic == "s1"
    stream.cancel()


async def test_the_end_of_a_client_ends_its_subscriptions(lite: LiteCaller, cluster: Cluster) -> None:
    stream = lite.caller.telemetry()
    await stream.write(consumer_settings(GROUP, PARENT, ClientType.LITE_PUSH_CONSUMER))
    await stream.read()
    await lite.subscribe("s1")
    subscriptions = cluster.broker.parts.lite.subscriptions
    assert subscriptions.count == 1
    await lite.caller.call("NotifyClientTermination", M.NotifyClientTerminationRequest())
    await until(lambda: subscriptions.count == 0)


@pytest.mark.parametrize("name", [b"INNER_MULTI_QUEUE_OFFSET", b"__LITE_TOPIC"])
async def test_damaged_properties_do_not_stop_a_receive(
    lite: LiteCaller, name: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(response: Frame, *given: str) -> Iterator[Popped]:
        response.body = bytes(response.body).replace(name, b"X" + name[1:], 1)
        return popped_messages(response, *given)

    monkeypatch.setattr(receives, "popped_messages", damaged)
    for lite_topic, body in (("s1", b"1"), ("s2", b"2")):
        await lite.send(lite_topic, body)
    await lite.subscribe("s1", "s2")
    (left,) = await lite.receive()
    other = b"1" if left.body == b"2" else b"2"
    assert f"the properties of message {other.decode()} are damaged" in caplog.text
