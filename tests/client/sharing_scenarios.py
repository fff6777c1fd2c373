"""Scenarios of push consumers whose group shares messages (POP): more members than queues, retries, order."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from msgspec.structs import replace
from tests.client.scenarios import (
    FROM_FIRST,
    Ledger,
    Names,
    Scenario,
    bodies,
    consuming,
    fill,
    names,
    sending,
)
from tests.client.simple_scenarios import create
from tests.kit.waiting import until

from cometmq import (
    Admin,
    ConsumeContext,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageQueue,
    Producer,
    PushConsumer,
    PushOptions,
    SendStatus,
    select_by_hash,
)
from cometmq.client import Listener, OrderlyListener
from cometmq.errors import NoRouteError
from cometmq.protocol.bodies import SetMessageRequestModeRequestBody, TopicConfig


def sharing(
    namesrv: str, name: Names, listener: Listener | OrderlyListener, **options: object
) -> PushConsumer:
    wanted = {"share": "messages", "consume_from_where": FROM_FIRST.consume_from_where, **options}
    return consuming(namesrv, name, listener, options=PushOptions(**wanted))  # type: ignore[arg-type]


async def more_members_than_queues_handle_each_message_once(namesrv: str) -> None:
    name, sent = names("share-members"), bodies(90)
    await create(namesrv, name.topic, 1)
    await fill(namesrv, name.topic, sent)
    ledger, by_member = Ledger(), Counter[int]()

    async def listener(number: int, messages: list[MessageExt]) -> None:
        await asyncio.sleep(0.05)
        by_member[number] += len(messages)
        ledger.add(messages)

    few = {"consume_concurrency": 2, "invisible_s": 20.0}
    async with (
        sharing(namesrv, name, partial(listener, 1), **few),
        sharing(namesrv, name, partial(listener, 2), **few),
        sharing(namesrv, name, partial(listener, 3), **few) as last,
    ):
        await ledger.has_all(sent)
        assert last.health().problems == ()
    assert ledger.bodies == Counter(sent)
    assert sorted(by_member) == [1, 2, 3]


async def a_failed_message_comes_again_and_a_hopeless_one_is_a_dead_letter(namesrv: str) -> None:
    name, ledger = names("share-retry"), Ledger()
    await fill(namesrv, name.topic, [b"fails once", b"fails always", b"is good"])

    async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        (message,) = messages
        ledger.add(messages)
        context.delay_level = 1
        fails = message.body == b"fails always" or (
            message.body == b"fails once" and message.reconsume_times == 0
        )
        return ConsumeStatus.RECONSUME_LATER if fails else ConsumeStatus.SUCCESS

    async with sharing(namesrv, name, listener, max_reconsume_times=2) as consumer:
        wanted = Counter({b"fails once": 2, b"fails always": 3, b"is good": 1})
        await ledger.wait_until(lambda ledger: ledger.bodies == wanted, "each message as often as it must")
        dead = MessageQueue(f"%DLQ%{name.group}", ledger.messages[0].broker_name, 0)
        addr = consumer.client.master_addr(dead.broker_name)

        async def arrived() -> bool:
            return await consumer.client.brokers.max_offset(addr, dead) == 1

        await until(arrived, "a dead letter")
    times = [(each.body, each.reconsume_times) for each in ledger.messages if each.body != b"is good"]
    assert sorted(times) == [
        *((b"fails always", again) for again in range(3)),
        *((b"fails once", again) for again in range(2)),
    ]
    assert {each.topic for each in ledger.messages} == {name.topic}


async def a_long_call_keeps_its_message(namesrv: str) -> None:
    name, ledger = names("share-long"), Ledger()
    await fill(namesrv, name.topic, [b"long"])

    async def listener(messages: list[MessageExt]) -> None:
        ledger.add(messages)
        await asyncio.sleep(15)  # longer than the lease and a broker's check of leases together

    async with (
        sharing(namesrv, name, listener, invisible_s=6.0) as one,
        sharing(namesrv, name, listener, invisible_s=6.0) as other,
    ):
        await until(lambda: one.health().consumed + other.health().consumed == 1, "the end of the call")
    assert ledger.bodies == Counter([b"long"])


async def a_stopped_member_gives_its_messages_back(namesrv: str) -> None:
    name, sent = names("share-stop"), bodies(12)
    await create(namesrv, name.topic, 1)
    await fill(namesrv, name.topic, sent)
    first, ledger, never = Ledger(), Ledger(), asyncio.Event()

    async def stuck(messages: list[MessageExt]) -> None:
        first.add(messages)
        await never.wait()

    options = {"consume_concurrency": 3, "invisible_s": 300.0, "drain_timeout_s": 0.1}
    async with sharing(namesrv, name, stuck, **options):
        await first.wait_until(lambda ledger: len(ledger.messages) == 3, "three calls")
    async with sharing(namesrv, name, ledger.listener):
        await ledger.has_all(sent)
    assert ledger.bodies == Counter(sent)


async def an_ordered_group_keeps_the_order_of_each_queue(namesrv: str) -> None:
    name, handled = names("share-order"), dict[int, list[bytes]]()
    await create(namesrv, name.topic, 2)
    sent = {number: bodies(8, f"queue {number}") for number in range(2)}
    async with sending(namesrv, "p-share-order") as producer:
        for number, some in sent.items():
            for body in some:
                message = Message(name.topic, body, properties={"n": str(number)})
                await producer.send(message, selector=select_by_hash, argument=number)

    async def listener(messages: list[MessageExt]) -> None:
        (message,) = messages
        if message.body == sent[0][3] and message.reconsume_times < 2:
            raise ValueError("fails twice")
        handled.setdefault(int(message.properties["n"]), []).append(message.body)

    ordered = {"orderly": True, "suspend_current_queue_s": 1.0}
    async with sharing(namesrv, name, listener, **ordered), sharing(namesrv, name, listener, **ordered):
        await until(lambda: sum(map(len, handled.values())) >= 16, "all messages")
    assert handled == sent


async def an_operator_switches_a_group_to_shared_messages(namesrv: str) -> None:
    name, ledger, sent = names("share-switch"), Ledger(), bodies(20)
    await fill(namesrv, name.topic, [b"pulled"])
    options = {"share": "broker", "rebalance_interval_s": 1.0}
    async with (
        Admin(namesrv) as admin,
        sharing(namesrv, name, ledger.listener, **options) as one,
        sharing(namesrv, name, ledger.listener, **options) as other,
    ):

        def has_queues(member: PushConsumer) -> bool:
            return any(each.queue.topic == name.topic for each in member.health().queues)

        await ledger.has_all([b"pulled"])
        await until(lambda: has_queues(one) and has_queues(other), "the queues divided")
        addr = one.client.master_addr(ledger.messages[0].broker_name)
        pop = SetMessageRequestModeRequestBody(name.topic, name.group, "POP", 0)
        await admin.set_consume_mode(addr, pop)
        await until(lambda: not has_queues(one) and not has_queues(other), "the queues released")
        await fill(namesrv, name.topic, sent)
        await ledger.has_all(sent)
        await admin.set_consume_mode(addr, replace(pop, mode="PULL"))
        await until(lambda: has_queues(one) and has_queues(other), "the queues divided again")
        await fill(namesrv, name.topic, [b"pulled again"])
        await ledger.has_all([b"pulled again"])


async def create_typed(admin: Admin, topic: str, kind: str) -> None:
    """Create a topic of a type with four queues at the only broker."""
    (broker,) = (await admin.cluster_info()).broker_addr_table.values()
    addr = broker.broker_addrs[0]
    config = TopicConfig(topic, 4, 4, attributes={"+message.type": kind})
    assert [each async for each in admin.create_topics([config], broker_addr=addr)] == [addr]


async def higher_priorities_come_first(namesrv: str) -> None:
    name, handled = names("share-priority"), list[int | None]()
    async with Admin(namesrv) as admin, sending(namesrv, "p-share-priority") as producer:
        await create_typed(admin, name.topic, "PRIORITY")
        await until(lambda: has_route(producer, name.topic), "the topic's route")
        results = [
            await producer.send(Message(name.topic, b"m", priority=priority)) for priority in (1, 9, 0, 2)
        ]
        # As many priorities as queues; the broker chooses the queue.
        assert [result.queue.queue_id for result in results] == [1, 3, 0, 2]

    async def listener(messages: list[MessageExt]) -> None:
        handled.extend(message.priority for message in messages)

    async with sharing(namesrv, name, listener, consume_concurrency=1, topic_max_count=1):
        await until(lambda: len(handled) == 4, "all messages")
    assert handled == [9, 2, 1, 0]


async def a_lite_topic_takes_messages(namesrv: str) -> None:
    topic = names("lite").topic
    async with Admin(namesrv) as admin, sending(namesrv, "p-lite") as producer:
        await create_typed(admin, topic, "LITE")
        await until(lambda: has_route(producer, topic), "the topic's route")
        result = await producer.send(Message(topic, b"m", lite_topic="session-1"))
        assert (result.status, result.queue.topic) == (SendStatus.SEND_OK, topic)


async def has_route(producer: Producer, topic: str) -> bool:
    try:
        return len(await producer.queues(topic)) == 4
    except NoRouteError:
        return False


SHARING_SCENARIOS: list[Scenario] = [
    more_members_than_queues_handle_each_message_once,
    a_failed_message_comes_again_and_a_hopeless_one_is_a_dead_letter,
    a_long_call_keeps_its_message,
    a_stopped_member_gives_its_messages_back,
    an_ordered_group_keeps_the_order_of_each_queue,
    an_operator_switches_a_group_to_shared_messages,
    higher_priorities_come_first,
    a_lite_topic_takes_messages,
]
