"""Scenarios for messages whose handling fails, run against any broker like those in scenarios.py."""

from __future__ import annotations

from collections import Counter

from tests.client.scenarios import Ledger, Scenario, bodies, consuming, fill, names, sending
from tests.kit.waiting import until

from cometmq import ConsumeContext, ConsumeFromWhere, ConsumeStatus, Message, MessageExt, PushOptions
from cometmq.admin import Admin, Resending, Selection
from cometmq.admin.dead_letters import original_topic


async def failed_messages_come_again(namesrv: str) -> None:
    name = names("retry")
    sent = bodies(8)
    await fill(namesrv, name.topic, sent)
    ledger = Ledger()

    async def fails_twice(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        ledger.add(messages)
        context.delay_level = 1
        if messages[0].body in sent[:2] and messages[0].reconsume_times < 2:
            if messages[0].body == sent[0]:
                raise RuntimeError("cannot handle this now")
            return ConsumeStatus.RECONSUME_LATER
        return ConsumeStatus.SUCCESS

    async with consuming(namesrv, name, fails_twice) as consumer:
        await ledger.wait_until(
            lambda ledger: ledger.bodies[sent[0]] >= 3 and ledger.bodies[sent[1]] >= 3, "two retries each"
        )
        assert consumer.health().failed == 4
    assert ledger.bodies == Counter({**dict.fromkeys(sent, 1), sent[0]: 3, sent[1]: 3})
    tries = [message for message in ledger.messages if message.body == sent[0]]
    assert [message.reconsume_times for message in tries] == [0, 1, 2]
    assert len({message.msg_id for message in tries}) == 1
    assert {message.topic for message in tries} == {name.topic}


async def part_of_a_batch_can_fail(namesrv: str) -> None:
    name = names("part")
    sent = bodies(4)
    async with sending(namesrv, "p-part") as producer:
        await producer.send_batch([Message(name.topic, body) for body in sent])
    ledger = Ledger()

    async def acknowledges_two(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        ledger.add(messages)
        context.delay_level = 1
        if len(messages) == 4:
            context.ack_index = 1
        return ConsumeStatus.SUCCESS

    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, consume_batch_max_size=8)
    async with consuming(namesrv, name, acknowledges_two, options=options):
        await ledger.wait_until(lambda ledger: sum(ledger.bodies.values()) >= 6, "two retried messages")
    assert ledger.bodies == Counter({sent[0]: 1, sent[1]: 1, sent[2]: 2, sent[3]: 2})


async def dead_letters_are_sent_again_to_their_group(namesrv: str) -> None:
    name = names("dlq")
    sent = bodies(3)
    await fill(namesrv, name.topic, sent)
    failed, cured = Ledger(), Ledger()

    async def hopeless_at_first(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
        if all("DLQ_RESEND_TIMES" in message.properties for message in messages):
            cured.add(messages)
            return ConsumeStatus.SUCCESS
        failed.add(messages)
        context.delay_level = -1
        return ConsumeStatus.RECONSUME_LATER

    everything = Selection(group=name.group)
    async with consuming(namesrv, name, hopeless_at_first), Admin(namesrv) as admin:
        await failed.has_all(sent)

        async def all_dead() -> bool:
            return [len(sent)] == [
                each.count for each in await admin.dead_letter_counts() if each.group == name.group
            ]

        await until(all_dead, "all messages in the dead-letter topic")
        dead = [message async for message in admin.dead_letters(everything)]
        assert Counter(message.body for message in dead) == Counter(sent)
        assert {original_topic(message) for message in dead} == {name.topic}
        for wanted in (["RESENT"] * 3, ["SKIPPED"] * 3):
            assert [result.state async for result in admin.resend(everything, Resending())] == wanted
        await cured.has_all(sent)
    assert failed.bodies == cured.bodies == Counter(sent)
    assert {message.msg_id for message in cured.messages} == {message.msg_id for message in dead}
    assert {(message.topic, message.reconsume_times) for message in cured.messages} == {(name.topic, 0)}


RETRY_SCENARIOS: list[Scenario] = [
    failed_messages_come_again,
    part_of_a_batch_can_fail,
    dead_letters_are_sent_again_to_their_group,
]
