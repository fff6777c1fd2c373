"""Scenarios of simple consumers: leases, acknowledgements, redelivery, order, filters, several topics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from tests.client.scenarios import (
    PATIENCE_S,
    PATIENT_CLIENT,
    Names,
    Scenario,
    bodies,
    fill,
    names,
    sending,
)
from tests.kit.waiting import until

from cometmq import (
    ConsumeFromWhere,
    Message,
    MessageExt,
    MessageQueue,
    SimpleConsumer,
    SimpleOptions,
    sql92,
)
from cometmq.client.group.subscription import Subscriptions
from cometmq.errors import BrokerError


def leasing(
    namesrv: str,
    name: Names,
    subscriptions: Subscriptions = (),
    *,
    invisible_s: float = 60.0,
    orderly: bool = False,
) -> SimpleConsumer:
    options = SimpleOptions(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, invisible_s=invisible_s, orderly=orderly, wait_s=5.0
    )
    return SimpleConsumer(
        name.group,
        subscriptions or name.topic,
        namesrv=namesrv,
        options=options,
        client_options=PATIENT_CLIENT,
    )


async def create(namesrv: str, topic: str, queues: int) -> None:
    async with sending(namesrv, "p-create") as producer:
        await producer.create_topic("TBW102", topic, queues)


async def gather(
    consumer: SimpleConsumer,
    done: Callable[[list[MessageExt]], bool],
    *,
    max_messages: int = 32,
    ack: bool = True,
) -> list[MessageExt]:
    """Receive until `done` is true of all messages received, and acknowledge them."""
    found: list[MessageExt] = []
    async with asyncio.timeout(PATIENCE_S):
        while not done(found):
            more = await consumer.receive(max_messages)
            found += more
            if ack:
                await consumer.ack(*more)
    return found


def count_of(wanted: int) -> Callable[[list[MessageExt]], bool]:
    return lambda found: len(found) >= wanted


async def acknowledged_messages_come_once_and_others_again(namesrv: str) -> None:
    name, sent = names("simple-ack"), bodies(20)
    await fill(namesrv, name.topic, sent)
    async with leasing(namesrv, name, invisible_s=8.0) as consumer:
        found = await gather(consumer, count_of(20), ack=False)
        assert Counter(message.body for message in found) == Counter(sent)
        assert {(message.reconsume_times, message.topic) for message in found} == {(0, name.topic)}
        await consumer.ack(found[0])
        await consumer.ack(*found[1:15])
        again = await gather(consumer, count_of(5))
        assert Counter(message.body for message in again) == Counter(each.body for each in found[15:])
        assert {(message.reconsume_times, message.topic) for message in again} == {(1, name.topic)}
        assert {message.msg_id for message in again} == {message.msg_id for message in found[15:]}
        # All leases of the first delivery have ended, so the group has no message left.
        assert await consumer.receive() == []
        assert consumer.problems == {}


async def a_changed_lease_ends_at_its_new_time(namesrv: str) -> None:
    name = names("simple-change")
    await fill(namesrv, name.topic, [b"longer", b"given back"])
    async with leasing(namesrv, name, invisible_s=6.0) as consumer:
        found = {each.body: each for each in await gather(consumer, count_of(2), ack=False)}
        await consumer.change_invisibility(found[b"longer"], 12.0)
        changed_at = time.monotonic()
        await consumer.change_invisibility(found[b"given back"], 0.0)
        again: list[MessageExt] = []
        while not again:
            again = await consumer.receive()
        assert [message.body for message in again] == [b"given back"]
        await consumer.ack(*again)
        (late,) = await gather(consumer, count_of(1))
        assert (late.body, late.reconsume_times) == (b"longer", 1)
        # Brokers end leases at whole seconds.
        assert time.monotonic() - changed_at > 10.0


async def two_members_share_one_queue(namesrv: str) -> None:
    name, sent = names("simple-share"), bodies(40)
    await create(namesrv, name.topic, 1)
    await fill(namesrv, name.topic, sent)
    async with leasing(namesrv, name) as one, leasing(namesrv, name) as other:
        mine = await gather(one, count_of(10), max_messages=10, ack=False)
        theirs = await gather(other, count_of(30))
        await one.ack(*mine)
        assert len(mine) == 10
        assert Counter(message.body for message in [*mine, *theirs]) == Counter(sent)
        assert await one.receive(wait_s=0) == []


async def filters_choose_by_tag_and_by_property(namesrv: str) -> None:
    name = names("simple-filter")
    async with sending(namesrv, "p-simple-filter") as producer:
        # The tags "AaAa" and "BBBB" have the same hash, so the broker delivers messages of both.
        for tag in ("AaAa", "BBBB", "TagC"):
            for number in range(4):
                properties = {"n": str(number)}
                body = f"{tag}{number}".encode()
                await producer.send(Message(name.topic, body, tags=tag, properties=properties))
    by_tag = Names(name.topic, f"{name.group}-tag")
    async with leasing(namesrv, by_tag, {name.topic: "AaAa || TagD"}) as consumer:
        found = await gather(consumer, count_of(4))
        assert {message.body for message in found} == {b"AaAa0", b"AaAa1", b"AaAa2", b"AaAa3"}
        assert await consumer.receive(wait_s=1) == []
    by_property = Names(name.topic, f"{name.group}-sql")
    async with leasing(namesrv, by_property, {name.topic: sql92("n > 2")}) as consumer:
        found = await gather(consumer, count_of(3))
        assert {message.body for message in found} == {b"AaAa3", b"BBBB3", b"TagC3"}
        with pytest.raises(BrokerError, match="SUBSCRIPTION_PARSE_FAILED"):
            await consumer.subscribe(name.topic, sql92("n > > 2"))


async def an_orderly_queue_waits_for_its_leased_messages(namesrv: str) -> None:
    name, sent = names("simple-order"), bodies(6)
    await create(namesrv, name.topic, 1)
    async with sending(namesrv, "p-simple-order") as producer:
        for body in sent:
            await producer.send(Message(name.topic, body))
    async with (
        leasing(namesrv, name, orderly=True, invisible_s=8.0) as one,
        leasing(namesrv, name, orderly=True) as other,
    ):
        (first, second) = await gather(one, count_of(2), max_messages=2, ack=False)
        assert [first.body, second.body] == sent[:2]
        assert await other.receive(wait_s=1) == []
        await one.ack(first, second)
        (third,) = await gather(one, count_of(1), max_messages=1, ack=False)
        assert (third.body, third.reconsume_times) == (sent[2], 0)
        # The lease of the third message ends, and the message is delivered again before all later ones.
        found = await gather(other, count_of(4), max_messages=1)
        assert [(message.body, message.reconsume_times) for message in found] == [
            (sent[2], 1),
            *((body, 0) for body in sent[3:]),
        ]


async def a_waiting_call_receives_from_any_of_its_topics(namesrv: str) -> None:
    name, other = names("simple-several"), names("simple-other").topic
    await create(namesrv, name.topic, 2)
    await create(namesrv, other, 2)
    async with leasing(namesrv, name, [name.topic, other]) as consumer:
        for topic in (other, name.topic):
            waiting = asyncio.create_task(consumer.receive(wait_s=60))
            await fill(namesrv, topic, [topic.encode()])
            async with asyncio.timeout(PATIENCE_S):
                (message,) = await waiting
            assert (message.topic, message.body) == (topic, topic.encode())
            await consumer.ack(message)
        await consumer.unsubscribe(other)
        await fill(namesrv, other, [b"not subscribed"])
        assert await consumer.receive(wait_s=1) == []


async def messages_of_a_cancelled_call_are_given_back(namesrv: str) -> None:
    name = names("simple-cancel")
    await create(namesrv, name.topic, 1)
    async with leasing(namesrv, name, invisible_s=600.0) as consumer:
        waiting = asyncio.create_task(consumer.receive(wait_s=30))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await waiting
        await fill(namesrv, name.topic, [b"for the next call"])
        (message,) = await gather(consumer, count_of(1))
        assert message.body == b"for the next call"


async def a_hopeless_message_is_moved_to_the_dead_letters(namesrv: str) -> None:
    name = names("simple-dead")
    await fill(namesrv, name.topic, [b"at once", b"later"])
    async with leasing(namesrv, name, invisible_s=6.0) as consumer:
        found = {each.body: each for each in await gather(consumer, count_of(2), ack=False)}
        await consumer.dead_letter(found[b"at once"])
        await consumer.change_invisibility(found[b"later"], 0.0)
        (retried,) = await gather(consumer, count_of(1), ack=False)
        assert (retried.body, retried.reconsume_times) == (b"later", 1)
        await consumer.dead_letter(retried)
        dead = MessageQueue(f"%DLQ%{name.group}", retried.broker_name, 0)
        addr = consumer.client.master_addr(dead.broker_name)
        await until(partial(is_end, consumer, addr, dead, 2), "2 dead letters")
        assert await consumer.receive(wait_s=8) == []


async def is_end(consumer: SimpleConsumer, addr: str, queue: MessageQueue, end: int) -> bool:
    return await consumer.client.brokers.max_offset(addr, queue) == end


SIMPLE_SCENARIOS: list[Scenario] = [
    acknowledged_messages_come_once_and_others_again,
    a_changed_lease_ends_at_its_new_time,
    two_members_share_one_queue,
    filters_choose_by_tag_and_by_property,
    an_orderly_queue_waits_for_its_leased_messages,
    a_waiting_call_receives_from_any_of_its_topics,
    messages_of_a_cancelled_call_are_given_back,
    a_hopeless_message_is_moved_to_the_dead_letters,
]
