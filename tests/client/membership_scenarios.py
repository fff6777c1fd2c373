"""Scenarios for groups and admin tools at any broker: queue shares, subscriptions, look-ups, limits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Mapping

import pytest
from tests.client.scenarios import (
    Ledger,
    Scenario,
    bodies,
    consuming,
    fill,
    names,
    read_at_least,
    reading,
    sending,
)
from tests.kit.waiting import until

from cometmq import (
    Admin,
    ClientOptions,
    ConsumeFromWhere,
    Message,
    MessageNotFound,
    MessageQueue,
    NoRouteError,
    PullConsumer,
    PullOptions,
    PullTurn,
    PushConsumer,
    PushOptions,
)
from cometmq.client import AllocateByMachineRoomNearby

FROM_FIRST_PULL = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


async def pull_members_share_queues_and_hand_them_over(namesrv: str) -> None:
    """Members are lite pull consumers with subscribe(); scheduled functions read the queues of one member."""
    name = names("lite")
    first, second = bodies(200, "a"), bodies(200, "b")
    await fill(namesrv, name.topic, first)
    ledger = Ledger()

    polls = 0

    async def poll(consumer: PullConsumer) -> None:
        nonlocal polls
        while True:
            ledger.add(await consumer.poll(1.0))
            polls += 1

    async with reading(namesrv, name.group, FROM_FIRST_PULL) as one:
        await one.subscribe(name.topic)
        polling = asyncio.create_task(poll(one))
        await ledger.has_all(first)
        # A poll commits the messages that the previous poll returned.
        before = polls
        await until(lambda: polls >= before + 2, "two more polls")
        await one.commit()
        called = Ledger()

        async def read(queue: MessageQueue, turn: PullTurn) -> None:
            offset = await turn.consumer.committed(queue)
            result = await turn.consumer.pull(queue, offset or 0)
            called.add(result.messages)
            turn.consumer.update_offset(queue, result.next_begin_offset)

        async with reading(namesrv, name.group, FROM_FIRST_PULL) as two:
            await two.schedule(name.topic, read)

            async def shared() -> bool:
                halves = [len(one.assignment), len(two.assignment)]
                return halves[0] == halves[1] and sum(halves) == len(await one.fetch_queues(name.topic))

            await until(shared, "the queues shared evenly")
            await fill(namesrv, name.topic, second)
            await until(
                lambda: _true(set(second) <= ledger.bodies.keys() | called.bodies.keys()), "the second lot"
            )
            assert not set(ledger.bodies) & set(called.bodies)
            assert called.messages
        await until(lambda: _true(len(one.assignment) == len(one.health().queues) == 2 * 2), "all taken over")
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    every = ledger.bodies + called.bodies
    assert every == Counter([*first, *second])


async def _true(value: bool) -> bool:
    return value


async def members_that_subscribe_different_things_are_told(namesrv: str) -> None:
    name = names("differ")
    await fill(namesrv, name.topic, [b"makes the topic"])
    quick = ClientOptions(api_timeout_s=30.0, heartbeat_interval_s=0.3)

    def member(expression: str) -> PushConsumer:
        ledger = Ledger()
        return PushConsumer(
            name.group, ledger.listener, {name.topic: expression}, namesrv=namesrv, client_options=quick
        )

    def is_told(consumer: PushConsumer) -> bool:
        return any(f"{name.topic} differently" in problem for problem in consumer.health().problems)

    async with member("a") as one:
        assert not is_told(one)
        async with member("b") as two:
            await until(lambda: _true(is_told(one) or is_told(two)), "one of them told")
            async with Admin(namesrv) as admin:
                found = await admin.consumer_connection(name.group)
            # Apache's brokers keep only the latest subscription, so the new member may see only its own.
            if any(each.subscriptions is not None for each in found.connection_set):
                await until(lambda: _true(is_told(two)), "the new member told")
                await until(lambda: _true(is_told(one)), "the old member told")
        await until(lambda: _true(not is_told(one)), "the old member told that it is over")


async def messages_are_found_and_sent_back(namesrv: str) -> None:
    name = names("find")
    ledger = Ledger()
    before = int(time.time() * 1000)
    async with sending(namesrv, "p-find") as producer:
        sent = await producer.send(Message(name.topic, b"found", keys=(f"k{name.topic}",)))

        async def by_key() -> bool:
            try:
                found = await producer.query_messages(name.topic, f"k{name.topic}")
            except NoRouteError:
                return False
            return [each.body for each in found] == [b"found"]

        await until(by_key, "the message found by its key")  # Apache's broker writes its index with a delay
        assert before - 5_000 <= await producer.earliest_store_time(sent.queue) <= before + 60_000
        assert (await producer.min_offset(sent.queue), await producer.max_offset(sent.queue)) == (0, 1)
        for msg_id in (sent.msg_id, sent.offset_msg_id):
            found = await producer.view_message(msg_id, name.topic)
            assert (found.body, found.msg_id) == (b"found", sent.msg_id)
        with pytest.raises(MessageNotFound):
            await producer.view_message("0" * 32, name.topic)
        await producer.create_topic(name.topic, f"{name.topic}-too", 3)

        async def made() -> bool:
            return len(await producer.queues(f"{name.topic}-too")) == 3

        await until(made, "a topic made where another one lies")
    async with consuming(namesrv, name, ledger.listener) as consumer:
        await ledger.has_all([b"found"])
        (first,) = ledger.messages
        assert (first.properties["MIN_OFFSET"], first.properties["MAX_OFFSET"]) == ("0", "1")
        assert before <= int(first.properties["CONSUME_START_TIME"]) <= int(time.time() * 1000)
        await consumer.send_message_back(first, 1)
        await ledger.wait_until(lambda seen: len(seen.messages) == 2, "the message that was sent back")
        async with reading(namesrv, name.group) as puller:
            # A message from a look-up does not contain its broker's name.
            await puller.send_message_back(await puller.view_message(sent.offset_msg_id), 1)
        await ledger.wait_until(lambda seen: len(seen.messages) == 3, "the one sent back by a pull consumer")
    assert [message.reconsume_times for message in ledger.messages] == [0, 1, 1]
    assert {message.msg_id for message in ledger.messages} == {sent.msg_id}


class Shelf:
    """An offset storage as a user may implement it."""

    def __init__(self) -> None:
        self.kept: dict[MessageQueue, int] = {}

    async def read(self, queue: MessageQueue) -> int | None:
        return self.kept.get(queue)

    async def write(self, table: Mapping[MessageQueue, int]) -> None:
        self.kept.update(table)


async def reading_may_begin_at_a_time(namesrv: str) -> None:
    name = names("since")
    sent = [b"old", b"new0", b"new1"]
    async with sending(namesrv, "p-since") as producer:
        queue = (await producer.send(Message(name.topic, sent[0]))).queue
        for body in sent[1:]:
            await asyncio.sleep(1.1)
            await producer.send(Message(name.topic, body), queue=queue)
        await until(lambda: _is(producer.max_offset(queue), 3), "all three stored")
    async with reading(namesrv, name.group) as puller:
        stored = {message.body: message for message in (await puller.pull(queue, 0)).messages}
        when = stored[b"new0"].store_timestamp_ms
        await puller.assign([queue])
        await puller.seek_to_time(queue, when)
        assert [message.body for message in await puller.poll(30.0)] == sent[1:]
        await puller.seek_to_begin(queue)
        assert [message.body for message in await puller.poll(30.0)] == sent
        await puller.seek_to_end(queue)
        assert await puller.poll(0.2) == []
    # For a group without offsets on a new topic a broker returns 0, and a user's storage returns None.
    ledger = Ledger()
    options = PushOptions(
        consume_from_where=ConsumeFromWhere.TIMESTAMP, consume_timestamp_ms=when, offset_storage=Shelf()
    )
    async with consuming(namesrv, name, ledger.listener, options=options):
        await ledger.has_all(sent[1:])
    assert ledger.bodies == Counter(sent[1:])


async def _is(found: Awaitable[object], wanted: object) -> bool:
    return await found == wanted


async def a_storage_of_ones_own_keeps_the_offsets(namesrv: str) -> None:
    name = names("own")
    shelf = Shelf()
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, offset_storage=shelf)
    for lot in (bodies(50, "a"), bodies(50, "b")):
        await fill(namesrv, name.topic, lot)
        ledger = Ledger()
        async with consuming(namesrv, name, ledger.listener, options=options):
            await ledger.has_all(lot)
        assert ledger.bodies == Counter(lot)
    assert sum(offset for queue, offset in shelf.kept.items() if queue.topic == name.topic) == 100
    async with reading(namesrv, name.group) as reader:
        # The broker has no offset for this group, for which it returns 0.
        assert {await reader.committed(queue) for queue in await reader.fetch_queues(name.topic)} == {0}


async def correction_offsets_are_the_lowest_of_all_groups(namesrv: str) -> None:
    name = names("correct")
    await fill(namesrv, name.topic, bodies(8))
    await read_at_least(namesrv, name.topic, 8)
    groups = {f"{name.group}-a": 2, f"{name.group}-b": 1}
    for group, offset in groups.items():
        async with reading(namesrv, group) as consumer:
            queues = await consumer.fetch_queues(name.topic)
            await consumer.pull(queues[0], 0)  # creates the group: 5.x accepts offsets only of known groups
            await consumer.commit(dict.fromkeys(queues, offset))
    async with Admin(namesrv) as admin:
        found = await admin.correction_offsets(name.topic, f"{name.group}-none")
        assert found == dict.fromkeys(queues, 1)
        found = await admin.correction_offsets(name.topic, f"{name.group}-b", [f"{name.group}-none"])
        assert found == dict.fromkeys(queues, 1)


async def rooms_are_shared_by_their_members(namesrv: str) -> None:
    """Two members run in the room of the queues, and one runs in another room."""
    name = names("rooms")
    await fill(namesrv, name.topic, [b"makes the topic"])
    near = AllocateByMachineRoomNearby(lambda queue: "here", lambda member: member.rpartition("@")[2][:4])

    def member(instance: str) -> PushConsumer:
        ledger = Ledger()
        return PushConsumer(
            name.group, ledger.listener, name.topic, namesrv=namesrv,
            options=PushOptions(allocate_strategy=near),
            client_options=ClientOptions(api_timeout_s=30.0, instance_name=instance),
        )  # fmt: skip

    def held(consumer: PushConsumer) -> int:
        return sum(queue.topic == name.topic for queue in consumer.assignment)

    async with member("here-1") as one, member("away-2") as two, member("here-3") as three:
        await until(lambda: _true((held(one), held(two), held(three)) == (2, 0, 2)), "shared within the room")
        await one.stop()
        await until(lambda: _true((held(two), held(three)) == (0, 4)), "taken over within the room")
        await three.stop()
        await until(lambda: _true(held(two) == 4), "taken over by another room")


MEMBERSHIP_SCENARIOS: list[Scenario] = [
    pull_members_share_queues_and_hand_them_over,
    members_that_subscribe_different_things_are_told,
    messages_are_found_and_sent_back,
    reading_may_begin_at_a_time,
    a_storage_of_ones_own_keeps_the_offsets,
    correction_offsets_are_the_lowest_of_all_groups,
    rooms_are_shared_by_their_members,
]
