"""Client scenarios that run both against our broker and against Apache's.

Each scenario gets the address of a name server and creates its own topics and groups. Every message is
accounted for by its body.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import pytest
from tests.kit.waiting import until

from cometmq import (
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    Message,
    MessageExt,
    MessageModel,
    MessageQueue,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullOptions,
    PullStatus,
    PushConsumer,
    PushOptions,
    SendStatus,
    select_by_hash,
    sql92,
)
from cometmq.client import Listener, OrderlyListener
from cometmq.client.group.subscription import Subscriptions
from cometmq.errors import BrokerError

Scenario = Callable[[str], Awaitable[None]]

_numbers = itertools.count(1)
FROM_FIRST = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
PATIENCE_S = 120.0  # enough for a busy machine whose JVMs have just started
# A JVM that has just started on a busy machine needs seconds for its first responses.
PATIENT = ProducerOptions(send_timeout_s=30.0)
PATIENT_CLIENT = ClientOptions(api_timeout_s=30.0)
# A send to a chosen queue is not retried, so the broker must not refuse it when the machine is busy.
PATIENT_BROKER = {"waitTimeMillsInSendQueue": "10000"}


@dataclass(frozen=True)
class Names:
    topic: str
    group: str


def names(kind: str) -> Names:
    number = next(_numbers)
    return Names(f"{kind}-{number}-{time.time_ns() % 10**9}", f"g-{kind}-{number}")


def sending(namesrv: str, group: str) -> Producer:
    return Producer(group, namesrv=namesrv, options=PATIENT, client_options=PATIENT_CLIENT)


def consuming(
    namesrv: str,
    name: Names,
    listener: Listener | OrderlyListener,
    *,
    subscriptions: Subscriptions = (),
    options: PushOptions = FROM_FIRST,
) -> PushConsumer:
    wanted = subscriptions or name.topic
    return PushConsumer(
        name.group, listener, wanted, namesrv=namesrv, options=options, client_options=PATIENT_CLIENT
    )


def reading(namesrv: str, group: str, options: PullOptions | None = None) -> PullConsumer:
    return PullConsumer(group, namesrv=namesrv, options=options, client_options=PATIENT_CLIENT)


class Ledger:
    """The received messages, counted by body."""

    def __init__(self) -> None:
        self.messages: list[MessageExt] = []
        self._changed = asyncio.Event()

    @property
    def bodies(self) -> Counter[bytes]:
        return Counter(message.body for message in self.messages)

    def add(self, messages: Iterable[MessageExt]) -> None:
        self.messages += messages
        self._changed.set()

    async def listener(self, messages: list[MessageExt]) -> None:
        self.add(messages)

    async def wait_until(self, done: Callable[[Ledger], bool], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not done(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"after {PATIENCE_S:g} s not {what}; {len(self.messages)} messages came"
            ) from None

    async def has_all(self, bodies: Iterable[bytes]) -> None:
        wanted = set(bodies)
        await self.wait_until(lambda ledger: wanted <= ledger.bodies.keys(), f"all {len(wanted)} messages")


def bodies(count: int, prefix: str = "m") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


async def fill(namesrv: str, topic: str, sent: Iterable[bytes], **options: object) -> None:
    async with sending(namesrv, "p-fill") as producer:
        results = await producer.send_many([Message(topic, body) for body in sent])
        assert {result.status for result in results} == {SendStatus.SEND_OK}


async def read_all(namesrv: str, topic: str, group: str = "g-read") -> list[MessageExt]:
    """Read every message of a topic, queue by queue."""
    found: list[MessageExt] = []
    async with reading(namesrv, group) as consumer:
        for queue in await consumer.fetch_queues(topic):
            offset, end = await consumer.min_offset(queue), await consumer.max_offset(queue)
            while offset < end:
                result = await consumer.pull(queue, offset)
                assert result.status is PullStatus.FOUND
                found += result.messages
                offset = result.next_begin_offset
    return found


async def read_at_least(namesrv: str, topic: str, count: int) -> list[MessageExt]:
    """Read a topic until it has at least `count` messages.

    Apache's broker responds to a send before the message is in its consume queue.
    """
    found: list[MessageExt] = []

    async def arrived() -> bool:
        found[:] = await read_all(namesrv, topic)
        return len(found) >= count

    await until(arrived, f"{count} messages stored")
    return found


# -- sending


async def send_in_every_mode(namesrv: str) -> None:
    topic = names("send").topic
    text = "Größe 訂單 🚀"
    async with sending(namesrv, "p-modes") as producer:
        full = Message(topic, b"full", tags="TagA", keys=("k1", "k2"), flag=7, properties={"note": text})
        result = await producer.send(full)
        assert result.status is SendStatus.SEND_OK
        assert result.queue in await producer.queues(topic)
        queues = await producer.queues(topic)
        given = await producer.send(Message(topic, b"given"), queue=queues[-1])
        assert given.queue == queues[-1]
        hashed = [
            await producer.send(
                Message(topic, b"hashed%d" % number), selector=select_by_hash, argument="order-1"
            )
            for number in range(3)
        ]
        assert len({sent.queue for sent in hashed}) == 1
        assert [sent.queue_offset - hashed[0].queue_offset for sent in hashed] == [0, 1, 2]
        batch = await producer.send_batch([Message(topic, body, tags="B") for body in bodies(5, "batch")])
        assert len(batch.msg_id.split(",")) == 5
        big = text.encode() * 4000
        await producer.send(Message(topic, big))
        many = await producer.send_many(Message(topic, body) for body in bodies(300, "many"))
        assert len({sent.msg_id for sent in many}) == 300
        for body in bodies(10, "oneway"):
            await producer.send_oneway(Message(topic, body))
    expected = [b"full", b"given", *bodies(3, "hashed"), *bodies(5, "batch"), big, *bodies(300, "many")]
    expected += bodies(10, "oneway")
    found = await read_at_least(namesrv, topic, len(expected))
    assert Counter(message.body for message in found) == Counter(expected)
    (stored,) = [message for message in found if message.body == b"full"]
    assert stored.msg_id == result.msg_id
    assert stored.offset_msg_id == result.offset_msg_id
    assert (stored.tags, stored.keys, stored.flag) == ("TagA", ("k1", "k2"), 7)
    assert stored.user_properties == {"note": text}
    assert (stored.queue, stored.queue_offset) == (result.queue, result.queue_offset)
    assert {message.msg_id for message in found if message.body.startswith(b"batch")} == set(
        batch.msg_id.split(",")
    )


# -- push


async def push_delivers_each_message_once(namesrv: str) -> None:
    name = names("push")
    sent = bodies(500)
    await fill(namesrv, name.topic, sent)
    ledger = Ledger()
    async with consuming(namesrv, name, ledger.listener) as consumer:
        await ledger.has_all(sent)
        assert consumer.health().ok
    assert ledger.bodies == Counter(sent)
    # The offsets were stored, so the group continues where it stopped.
    more = bodies(20, "more")
    await fill(namesrv, name.topic, more)
    again = Ledger()
    async with consuming(namesrv, name, again.listener):
        await again.has_all(more)
    assert again.bodies == Counter(more)


async def push_filters_tags_exactly(namesrv: str) -> None:
    name = names("tags")
    # The tags "AaAa" and "BBBB" have the same hash, so the broker delivers messages of both.
    wanted = {tag: bodies(20, tag) for tag in ("AaAa", "TagB")}
    other = {tag: bodies(20, tag) for tag in ("BBBB", "TagC")}
    async with sending(namesrv, "p-tags") as producer:
        await producer.send_many(
            [
                Message(name.topic, body, tags=tag)
                for tag, all_bodies in {**wanted, **other}.items()
                for body in all_bodies
            ]
        )
    ledger = Ledger()
    expected = [body for all_bodies in wanted.values() for body in all_bodies]
    subscriptions = {name.topic: "AaAa || TagB"}
    async with consuming(namesrv, name, ledger.listener, subscriptions=subscriptions) as consumer:
        await ledger.has_all(expected)

        async def caught_up() -> bool:
            # Messages that the filter skips count as consumed.
            await consumer.persist_offsets()
            brokers, client = consumer.client.brokers, consumer.client
            for queue in await client.read_queues(name.topic):
                addr = client.master_addr(queue.broker_name)
                stored = await brokers.consumer_offset(addr, name.group, queue)
                if stored != await brokers.max_offset(addr, queue):
                    return False
            return True

        await until(caught_up, "the group's offsets at the end of all queues")
    assert ledger.bodies == Counter(expected)


async def sql_filters_choose_by_properties(namesrv: str) -> None:
    name = names("sql")
    wanted, wrong = sql92("n >= 10 AND region IN ('eu', 'us')"), sql92("n > > 10")
    sent = {f"{region}{n}".encode(): (n, region) for region in ("eu", "us", "asia") for n in range(20)}
    expected = [body for body, (n, region) in sent.items() if n >= 10 and region != "asia"]
    async with sending(namesrv, "p-sql") as producer:
        for body, (n, region) in sent.items():
            await producer.send(Message(name.topic, body, properties={"n": str(n), "region": region}))
        ledger = Ledger()

        async def fails_once(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            ledger.add(messages)
            context.delay_level = 1
            again = messages[0].body == b"eu10" and messages[0].reconsume_times == 0
            return ConsumeStatus.RECONSUME_LATER if again else ConsumeStatus.SUCCESS

        async with consuming(namesrv, name, fails_once, subscriptions={name.topic: wanted}) as consumer:
            await ledger.has_all(expected)
            await producer.send(Message(name.topic, b"late", properties={"n": "11", "region": "us"}))
            await ledger.wait_until(lambda seen: len(seen.messages) == len(expected) + 2, "all")
            with pytest.raises(BrokerError, match="SUBSCRIPTION_PARSE_FAILED"):
                await consumer.subscribe(name.topic, wrong)
            assert consumer.health().ok
    assert ledger.bodies == Counter([*expected, b"eu10", b"late"])

    with pytest.raises(BrokerError, match="SUBSCRIPTION_PARSE_FAILED"):
        await consuming(namesrv, name, ledger.listener, subscriptions={name.topic: wrong}).start()
    found: list[bytes] = []
    from_first = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with reading(namesrv, f"{name.group}-pull", from_first) as reader:
        for queue in await reader.fetch_queues(name.topic):
            offset = 0
            while offset < await reader.max_offset(queue):
                result = await reader.pull(queue, offset, expression=wanted)
                found += [message.body for message in result.messages]
                offset = result.next_begin_offset
        with pytest.raises(BrokerError, match="SUBSCRIPTION_PARSE_FAILED"):
            await reader.pull(queue, 0, expression=wrong)
        await reader.assign_topic(name.topic, expression=wanted)
        ahead = [message.body async for message in first(reader, len(found))]
    assert Counter(found) == Counter(ahead) == Counter([*expected, b"late"])


async def holds_queues_of(consumer: PushConsumer, topic: str) -> bool:
    return sum(queue.topic == topic for queue in consumer.assignment) >= 4


async def a_strict_start_leaves_out_what_a_young_topic_held_before(namesrv: str) -> None:
    name, old, new = names("strict"), bodies(8, "old"), bodies(8, "new")
    await fill(namesrv, name.topic, old)
    from_last = PushOptions(start_strictly=True)
    from_now = PushOptions(
        start_strictly=True,
        consume_from_where=ConsumeFromWhere.TIMESTAMP,
        consume_timestamp_ms=int(time.time() * 1000) + 3_600_000,
    )
    first_in = {f"{name.group}-last": from_last, f"{name.group}-time": from_now}
    ledgers = {group: Ledger() for group in first_in}
    for group, options in first_in.items():
        consumer = PushConsumer(group, ledgers[group].listener, name.topic, namesrv=namesrv, options=options)
        async with consumer:
            await until(partial(holds_queues_of, consumer, name.topic), "all queues")
    # The groups' offsets were stored, so they receive the messages that are sent while they are stopped.
    await fill(namesrv, name.topic, new)
    for group, options in first_in.items():
        ledger = ledgers[group]
        async with PushConsumer(group, ledger.listener, name.topic, namesrv=namesrv, options=options):
            await ledger.wait_until(lambda seen: set(new) <= set(seen.bodies), "what is new")
        assert set(ledger.bodies) == set(new)


async def consumers_share_queues_and_take_over(namesrv: str) -> None:
    name = names("share")
    first_lot, second_lot, third_lot = bodies(200, "a"), bodies(200, "b"), bodies(200, "c")
    await fill(namesrv, name.topic, first_lot)
    ledgers = [Ledger(), Ledger()]
    merged = Ledger()

    def listener(number: int) -> Callable[[list[MessageExt]], Awaitable[None]]:
        async def take(messages: list[MessageExt]) -> None:
            ledgers[number].add(messages)
            merged.add(messages)

        return take

    one, two = (
        PushConsumer(name.group, listener(number), name.topic, namesrv=namesrv, options=FROM_FIRST)
        for number in range(2)
    )

    def held(consumer: PushConsumer) -> set[MessageQueue]:
        return {queue for queue in consumer.assignment if queue.topic == name.topic}

    async with two:
        await one.start()
        queues = set(await one.client.read_queues(name.topic))

        async def shared() -> bool:
            return len(held(one)) == len(held(two)) == len(queues) / 2 and held(one) | held(two) == queues

        await until(shared, "the queues shared evenly")
        await merged.has_all(first_lot)
        await fill(namesrv, name.topic, second_lot)
        await merged.has_all(second_lot)
        of_second = [set(ledger.bodies) & set(second_lot) for ledger in ledgers]
        assert of_second[0]
        assert of_second[1]
        assert not of_second[0] & of_second[1]
        await die(one)

        async def taken_over() -> bool:
            return held(two) == queues

        await until(taken_over, "the queues of the dead consumer taken over")
        await fill(namesrv, name.topic, third_lot)
        await merged.has_all(third_lot)
        assert set(third_lot) <= ledgers[1].bodies.keys()
    # Delivery is at least once: messages whose offsets the killed member had not stored are delivered again,
    # and none is lost.
    assert set(merged.bodies) == {*first_lot, *second_lot, *third_lot}
    assert all(merged.bodies[body] == 1 for body in third_lot)


async def die(consumer: PushConsumer) -> None:
    """Stop a consumer as a kill would: close its connections without storing offsets or unregistering."""
    await consumer.client.close()
    await consumer.stop()


async def leaving_in_order_repeats_nothing(namesrv: str) -> None:
    name = names("leave")
    sent = bodies(400)
    await fill(namesrv, name.topic, sent)
    merged = Ledger()

    async def slow(messages: list[MessageExt]) -> None:
        await asyncio.sleep(0.02)
        merged.add(messages)

    one = consuming(namesrv, name, slow)
    await one.start()
    await merged.wait_until(lambda ledger: len(ledger.messages) >= 100, "100 messages")
    await one.stop()
    at_stop = len(merged.messages)
    async with consuming(namesrv, name, slow):
        await merged.has_all(sent)
    repeated = sum(merged.bodies.values()) - len(sent)
    # Only messages that were handled before an older unfinished message may be delivered again: for each
    # queue, at most as many as there are concurrent listener calls.
    assert at_stop < len(sent)
    assert repeated <= 20


async def dead_letters(consumer: PushConsumer, name: Names, count: int) -> None:
    """Wait until the dead-letter topic holds `count` messages.

    By default the dead-letter topic is write-only, so its queue is built here and not taken from the route.
    """
    client = consumer.client
    dead = MessageQueue(f"%DLQ%{name.group}", (await client.read_queues(name.topic))[0].broker_name, 0)

    async def all_dead() -> bool:
        return await client.brokers.max_offset(client.master_addr(dead.broker_name), dead) == count

    await until(all_dead, f"{count} messages in the dead-letter topic")


async def delayed_messages_come_after_their_delay(namesrv: str) -> None:
    name = names("delay")
    async with sending(namesrv, "p-delay") as producer:
        await producer.send(Message(name.topic, b"now"))
        begun = time.time()
        await producer.send(Message(name.topic, b"1s", delay_level=1))
        await producer.send(Message(name.topic, b"5s", delay_level=2))
    came: dict[bytes, float] = {}
    ledger = Ledger()

    async def stamp(messages: list[MessageExt]) -> None:
        came.update({message.body: time.time() - begun for message in messages})
        ledger.add(messages)

    async with consuming(namesrv, name, stamp):
        await ledger.has_all([b"now", b"1s", b"5s"])
    assert ledger.bodies == Counter([b"now", b"1s", b"5s"])
    assert 0.9 <= came[b"1s"] < 4.5
    assert 4.9 <= came[b"5s"] < 15


async def broadcasting_gives_every_member_every_message(namesrv: str) -> None:
    name = names("broadcast")
    sent, later = bodies(60), bodies(30, "later")
    await fill(namesrv, name.topic, sent)
    with tempfile.TemporaryDirectory() as directory:

        def member(ledger: Ledger, instance: str) -> PushConsumer:
            options = PushOptions(
                message_model=MessageModel.BROADCASTING,
                consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
                offset_dir=directory,
            )
            client = ClientOptions(api_timeout_s=30.0, instance_name=instance)
            return PushConsumer(
                name.group,
                ledger.listener,
                name.topic,
                namesrv=namesrv,
                options=options,
                client_options=client,
            )

        one, two = Ledger(), Ledger()
        async with member(one, "one"), member(two, "two"):
            await one.has_all(sent)
            await two.has_all(sent)
        assert one.bodies == two.bodies == Counter(sent)
        # These groups store their offsets in local files: each member continues where it stopped.
        await fill(namesrv, name.topic, later)
        again = Ledger()
        async with member(again, "one"):
            await again.has_all(later)
        assert again.bodies == Counter(later)


# -- pull


async def pull_reads_seeks_and_keeps_offsets(namesrv: str) -> None:
    name = names("pull")
    sent = bodies(200)
    await fill(namesrv, name.topic, sent)
    await read_at_least(namesrv, name.topic, len(sent))
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with reading(namesrv, name.group, options=options) as consumer:
        queues = await consumer.fetch_queues(name.topic)
        bounds = {
            queue: (await consumer.min_offset(queue), await consumer.max_offset(queue)) for queue in queues
        }
        assert sum(high - low for low, high in bounds.values()) == len(sent)
        queue = queues[0]
        low, high = bounds[queue]
        nothing = await consumer.pull(queue, high)
        assert (nothing.status, nothing.next_begin_offset) == (PullStatus.NO_NEW_MSG, high)
        beyond = await consumer.pull(queue, high + 100)
        assert (beyond.status, beyond.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, high)
        one = await consumer.pull(queue, low, max_count=1)
        assert [message.queue_offset for message in one.messages] == [low]
        assert (one.min_offset, one.max_offset, one.next_begin_offset) == (low, high, low + 1)
        await consumer.assign_topic(name.topic)
        read = [message async for message in first(consumer, len(sent))]
        assert Counter(message.body for message in read) == Counter(sent)
        await consumer.seek_to_begin(queue)
        again = [message async for message in first(consumer, high - low)]
        assert [message.queue_offset for message in again] == list(range(low, high))
        await consumer.commit()
        for each, (_, end) in bounds.items():
            consumer.update_offset(each, end)
    async with reading(namesrv, name.group, options=options) as consumer:
        assert [await consumer.committed(queue) for queue in queues] == [bounds[queue][1] for queue in queues]
        await consumer.assign(queues)
        assert await consumer.poll(0.3) == []
        await fill(namesrv, name.topic, [b"late"])
        assert [message.body for message in await consumer.poll(30)] == [b"late"]


async def first(consumer: PullConsumer, count: int):  # type: ignore[no-untyped-def]
    taken = 0
    async for message in consumer:
        yield message
        taken += 1
        if taken == count:
            return


async def a_blocking_pull_ends_when_a_message_comes(namesrv: str) -> None:
    name = names("wait")
    await fill(namesrv, name.topic, [b"first"])
    async with reading(namesrv, name.group) as consumer, sending(namesrv, "p-wait") as producer:
        queue = (await consumer.fetch_queues(name.topic))[0]
        end = await consumer.max_offset(queue)
        waiting = asyncio.create_task(consumer.pull_blocking(queue, end))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await producer.send(Message(name.topic, b"awaited"), queue=queue)
        result = await asyncio.wait_for(waiting, 60)
    assert [message.body for message in result.messages] == [b"awaited"]


async def large_messages_pass(namesrv: str) -> None:
    name = names("large")
    noise = random.Random(7).randbytes(3_000_000)
    async with sending(namesrv, "p-large") as producer:
        await producer.send(Message(name.topic, noise))
        await producer.send(Message(name.topic, bytes(3_000_000)))
    found = await read_at_least(namesrv, name.topic, 2)
    assert sorted(message.body for message in found) == sorted([noise, bytes(3_000_000)])


SCENARIOS: list[Scenario] = [
    send_in_every_mode,
    large_messages_pass,
    push_delivers_each_message_once,
    push_filters_tags_exactly,
    sql_filters_choose_by_properties,
    a_strict_start_leaves_out_what_a_young_topic_held_before,
    consumers_share_queues_and_take_over,
    leaving_in_order_repeats_nothing,
    delayed_messages_come_after_their_delay,
    broadcasting_gives_every_member_every_message,
    pull_reads_seeks_and_keeps_offsets,
    a_blocking_pull_ends_when_a_message_comes,
]
