"""What the members that pop record of acks whose effect they do not know."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.simulation.pops import Lease, LeaseWatch, Place, PopMembers

from cometmq.message import MessageExt
from cometmq.protocol.pop import TopicKind
from cometmq.testing import History
from cometmq.testing.history import operations


class Member:
    """A member with the leases of two messages. The broker responds once `answers` is set."""

    def __init__(self) -> None:
        self.epochs = {"a": 1}
        self.answers = asyncio.Event()
        self.history = History()
        watch = LeaseWatch(lambda: 1.0, lambda: dict(self.epochs), lambda rule, what: None, ordered=False)
        clients: Any = SimpleNamespace(history=self.history, handled=set(), chance=None)
        self._members = PopMembers(clients, watch, ordered=False)
        self.leases = [
            Lease(Place("a", TopicKind.NORMAL, 0, offset), "c", begun=0.5, lasts=2.0, epoch=1)
            for offset in range(2)
        ]

    async def ack(self, *messages: MessageExt) -> None:
        await self.answers.wait()

    async def ack_all(self) -> None:
        handled = [
            (message := MessageExt("T", f"m{lease.place.offset}".encode()), lease, self._begin(message))
            for lease in self.leases
        ]
        consumer: Any = self
        await self._members._ack(consumer, handled)  # noqa: SLF001

    def _begin(self, message: MessageExt) -> int:
        return self.history.begin("handle", process="c", group="g", message=message.body.decode())


async def test_acks_of_several_messages_prove_nothing_if_the_broker_has_lost_their_leases() -> None:
    member = Member()
    member.answers.set()
    await member.ack_all()
    assert [each.acked for each in member.leases] == [1.0, 1.0]
    restarted = Member()
    restarted.answers.set()
    restarted.epochs["a"] = 2
    await restarted.ack_all()
    assert [each.acked for each in restarted.leases] == [None, None]


async def test_a_message_is_handled_even_if_its_member_is_killed_before_the_response_to_the_ack() -> None:
    member = Member()
    acking = asyncio.create_task(member.ack_all())
    await asyncio.sleep(0)
    member.history.died("c")
    acking.cancel()
    assert [each.result for each in operations(member.history.lines())] == ["ok", "ok"]
