"""Scenarios for orderly listeners, run against any broker like those in scenarios.py."""

from __future__ import annotations

import dataclasses
from collections import Counter

from tests.client.scenarios import Ledger, Scenario, consuming, dead_letters, fill, names, sending

from cometmq import (
    ConsumeFromWhere,
    Message,
    MessageExt,
    OrderlyContext,
    OrderlyStatus,
    PushOptions,
    select_by_hash,
)

ORDERLY = PushOptions(
    orderly=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET, suspend_current_queue_s=0.01
)
AGAIN = OrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


async def fill_in_order(namesrv: str, topic: str, keys: int, count: int) -> None:
    """Send messages "key:number"; all messages of a key go to one queue, in order."""
    async with sending(namesrv, "p-order") as producer:
        for number in range(count):
            for key in range(keys):
                message = Message(topic, b"%d:%02d" % (key, number))
                await producer.send(message, selector=select_by_hash, argument=key)


async def order_is_kept_through_failures(namesrv: str) -> None:
    name = names("orderly")
    keys, count = 4, 25
    await fill_in_order(namesrv, name.topic, keys, count)
    tries: dict[bytes, int] = {}
    handled = Ledger()
    last: dict[int, bytes] = {}

    async def fails_once(messages: list[MessageExt]) -> OrderlyStatus | None:
        (message,) = messages
        tries[message.body] = tries.get(message.body, 0) + 1
        if tries[message.body] == 1:
            last[message.queue_id] = message.body
            if message.body.endswith(b"3"):
                raise RuntimeError("not yet")
            return AGAIN
        assert last[message.queue_id] == message.body, "another message came between two tries"
        assert message.reconsume_times == 1
        handled.add(messages)
        return None

    async with consuming(namesrv, name, fails_once, options=ORDERLY):
        await handled.wait_until(lambda ledger: len(ledger.messages) == keys * count, "all handled")
    for key in range(keys):
        of_key = [message.body for message in handled.messages if message.body.startswith(b"%d:" % key)]
        assert of_key == [b"%d:%02d" % (key, number) for number in range(count)]
    nothing = Ledger()
    async with consuming(namesrv, name, nothing.listener, options=ORDERLY):
        await fill(namesrv, name.topic, [b"news"])
        await nothing.has_all([b"news"])
    assert nothing.bodies == Counter([b"news"])


async def an_orderly_listener_commits_and_rolls_back(namesrv: str) -> None:
    name = names("commit")
    await fill_in_order(namesrv, name.topic, 1, 6)
    ledger = Ledger()
    answers = [
        *(OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT, OrderlyStatus.SUCCESS, OrderlyStatus.ROLLBACK),
        *(OrderlyStatus.SUCCESS, AGAIN, OrderlyStatus.SUCCESS, OrderlyStatus.COMMIT),
    ]

    async def listener(messages: list[MessageExt], context: OrderlyContext) -> OrderlyStatus:
        ledger.add(messages)
        context.auto_commit = False
        return answers.pop(0) if answers else OrderlyStatus.SUCCESS

    async with consuming(namesrv, name, listener, options=ORDERLY):
        await ledger.wait_until(lambda ledger: len(ledger.messages) == 9, "nine calls")
    numbers = [int(message.body[-2:]) for message in ledger.messages]
    assert numbers == [0, 1, 2, 3, 2, 3, 3, 4, 5]
    again = Ledger()
    async with consuming(namesrv, name, again.listener, options=ORDERLY):
        await again.has_all([b"0:05"])
    assert again.bodies == Counter([b"0:05"])  # the message was handled but not committed


async def an_orderly_message_that_stays_hopeless_becomes_a_dead_letter(namesrv: str) -> None:
    name = names("orderly-dlq")
    await fill_in_order(namesrv, name.topic, 1, 3)
    ledger = Ledger()

    async def listener(messages: list[MessageExt]) -> OrderlyStatus:
        ledger.add(messages)
        return AGAIN if messages[0].body == b"0:01" else OrderlyStatus.SUCCESS

    options = dataclasses.replace(ORDERLY, max_reconsume_times=2)
    async with consuming(namesrv, name, listener, options=options) as consumer:
        await ledger.has_all([b"0:02"])
        await dead_letters(consumer, name, 1)
    assert [message.body[-1:] for message in ledger.messages] == [b"0", b"1", b"1", b"1", b"2"]


ORDERLY_SCENARIOS: list[Scenario] = [
    order_is_kept_through_failures,
    an_orderly_listener_commits_and_rolls_back,
    an_orderly_message_that_stays_hopeless_becomes_a_dead_letter,
]
