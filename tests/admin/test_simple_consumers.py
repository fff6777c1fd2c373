"""Administration of a group whose members are simple consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.admin.conftest import Shell

from cometmq import Message, SimpleConsumer
from cometmq.admin import Admin, OffsetWay, Reset
from cometmq.admin.commands import formats


def beside_members(mq: Shell, use: Callable[[Admin], Awaitable[None]]) -> None:
    """Run a function while group `leasing` has two simple consumers."""
    mq.ok("updateTopic", "-c", "DefaultCluster", "-t", "leased", "-r", "2", "-w", "2")
    mq.ok("sendMessage", "-t", "leased", "-p", "x")

    async def run() -> None:
        members = [SimpleConsumer("leasing", "leased", namesrv=mq.broker.namesrv) for _ in range(2)]
        async with members[0], members[1], Admin(mq.broker.namesrv) as admin:
            await use(admin)

    asyncio.run(run())


def test_no_queue_of_the_group_lacks_a_holder(mq: Shell) -> None:
    async def check(admin: Admin) -> None:
        found = await admin.subscriptions("leasing")
        assert [each.subscriptions for each in found.members] == [{"leased": "*"}] * 2
        assert ([each.queues for each in found.members], found.unbalanced) == ([None, None], None)

    beside_members(mq, check)


def test_messages_in_flight_are_shown(mq: Shell) -> None:
    async def check(admin: Admin) -> None:
        async with SimpleConsumer("leasing", "leased", namesrv=mq.broker.namesrv) as consumer:
            await admin.send(Message(topic="leased", body=b"y"))
            received = await consumer.receive()
            assert received
            found = await admin.progress("leasing")
            assert found.leased_total == len(received)
            lines = list(formats.group_progress(found, show_client_ip=True, total=found.diff_total))
            assert lines[0].split()[-3:] == ["#Diff", "#Inflight", "#LastTime"]
            assert lines[-1] == f"Inflight Total: {len(received)}"
            (summary,) = [each for each in await admin.groups() if each.group == "leasing"]
            assert summary.consume_type == "POP"

    beside_members(mq, check)


@pytest.mark.slow("a receive that has begun before the reset waits for 15 s")
def test_members_that_consume_on_from_a_new_offset_are_no_problem(mq: Shell) -> None:
    async def check(admin: Admin) -> None:
        for each in await admin.reset_offset(Reset(group="leasing", topic="leased")):
            assert not each.problem
        async with SimpleConsumer("leasing", "leased", namesrv=mq.broker.namesrv) as consumer:
            ahead = asyncio.create_task(_consume(consumer, 1))
            done = await admin.reset_offset(Reset(group="leasing", topic="leased", at_ms=0))
            await ahead
        assert [each.problem for each in done] == ["", ""]

    beside_members(mq, check)


async def _consume(consumer: SimpleConsumer, count: int) -> None:
    while count > 0:
        for message in await consumer.receive():
            await consumer.ack(message)
            count -= 1


def test_new_offsets_are_stored_at_the_broker(mq: Shell) -> None:
    async def check(admin: Admin) -> None:
        done = await admin.reset_offset(Reset(group="leasing", topic="leased"))
        assert {(each.way, each.problem) for each in done} == {(OffsetWay.STORED, "")}
        assert [each.seen for each in done] == [each.broker_offset for each in done]
        assert any(each.seen for each in done)

    beside_members(mq, check)
