"""Administration of a group whose members are simple consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.admin.conftest import Shell

from cometmq import SimpleConsumer
from cometmq.admin import Admin, OffsetWay, Reset


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


def test_new_offsets_are_stored_at_the_broker(mq: Shell) -> None:
    async def check(admin: Admin) -> None:
        done = await admin.reset_offset(Reset(group="leasing", topic="leased"))
        assert {(each.way, each.problem) for each in done} == {(OffsetWay.STORED, "")}
        assert [each.seen for each in done] == [each.broker_offset for each in done]
        assert any(each.seen for each in done)

    beside_members(mq, check)
