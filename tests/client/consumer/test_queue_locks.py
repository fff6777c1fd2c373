"""The lock tables of members and of the broker: no two members ever consider the same lock their own."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.broker.groups.locks import QueueLocks as BrokersLocks
from cometmq.client.consumer.orderly_queue import LockTable
from cometmq.client.consumer.queue_locks import QueueLocks
from cometmq.message import MessageQueue

QUEUES = [MessageQueue("T", "a", number) for number in range(2)]
MEMBERS = st.integers(0, 1)
KINDS = st.sampled_from(["lock", "lock", "renew", "unlock"])
STAGES = st.integers(0, 2)
STEPS_S = st.sampled_from([1.0, 20.0, 29.99, 60.01])


@dataclass
class Request:
    """A lock request on its way to the broker, or a response with the granted queues."""

    kind: str
    queues: list[MessageQueue]
    requested_at: float
    granted: list[MessageQueue] | None = None


@dataclass
class Member:
    table: LockTable = field(default_factory=LockTable)
    to_broker: deque[Request] = field(default_factory=deque)
    """Requests that were sent but not handled yet. The connection keeps their order, even after a timeout."""
    waits_for: Request | None = None
    confirmed_by: dict[MessageQueue, int] = field(default_factory=dict)
    """For each queue, the number of the broker run that last locked it or renewed its lock."""


class Locks(RuleBasedStateMachine):
    """A model: requests and responses are delayed or lost, brokers restart, members return late."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self.locks = BrokersLocks()
        self.run = 0
        self.members = [Member() for _ in range(2)]

    @rule(step=STEPS_S)
    def time_goes_on(self, step: float) -> None:
        self.now += step
        self.locks.expire(int(self.now * 1000))

    @rule(number=MEMBERS, kind=KINDS, queues=st.sets(st.sampled_from(QUEUES), min_size=1), stage=STAGES)
    def a_member_asks(self, number: int, kind: str, queues: set[MessageQueue], stage: int) -> None:
        """Send a request unless one is pending, as client/consumer/queue_locks.py does.

        stage: 0 sends the request, 1 lets the broker handle it, too, and 2 also delivers the response.
        """
        member = self.members[number]
        if member.waits_for is not None:
            return
        asked = list(member.table.queues) if kind == "renew" else sorted(queues)
        if kind == "unlock":
            member.table.forget(asked)
        member.waits_for = Request(kind, asked, self.now)
        member.to_broker.append(member.waits_for)
        if stage > 0:
            self.the_broker_reads(number)
        if stage > 1:
            self.a_member_hears(number)

    @rule(number=MEMBERS)
    def the_broker_reads(self, number: int) -> None:
        """Handle all pending requests of a member, in the order in which they were sent."""
        name, pending = f"member {number}", self.members[number].to_broker
        while pending:
            request = pending.popleft()
            if request.kind == "unlock":
                self.locks.unlock("G", name, request.queues)
                request.granted = []
            else:
                request.granted = self.locks.lock("G", name, request.queues, int(self.now * 1000))

    @rule(number=MEMBERS)
    def a_member_hears(self, number: int) -> None:
        member = self.members[number]
        request = member.waits_for
        if request is None or request.granted is None:
            return
        member.waits_for = None
        if request.kind == "lock":
            member.table.taken(request.granted, request.requested_at)
        elif request.kind == "renew":
            member.table.renewed(request.queues, request.granted, request.requested_at, self.now)
        if request.kind != "unlock":
            member.confirmed_by.update(dict.fromkeys(request.granted, self.run))

    @rule(number=MEMBERS)
    def a_member_waits_no_longer(self, number: int) -> None:
        self.members[number].waits_for = None

    @rule()
    def the_broker_starts_anew(self) -> None:
        """Restart the broker: its locks, its connections and all requests in flight are lost."""
        self.locks = BrokersLocks()
        self.run += 1
        for member in self.members:
            member.to_broker.clear()
            member.waits_for = None

    def believes(self, member: Member, queue: MessageQueue) -> bool:
        return member.confirmed_by.get(queue) == self.run and member.table.holds(queue, self.now)

    @invariant()
    def who_believes_has_the_lock(self) -> None:
        for queue in QUEUES:
            entry = self.locks.groups.get("G", {}).get(queue)
            for number, member in enumerate(self.members):
                if self.believes(member, queue):
                    assert entry is not None
                    assert entry.client_id == f"member {number}"
                    assert not entry.is_over(int(self.now * 1000))


TestLocks = Locks.TestCase


class Client:
    """The part of a client instance that QueueLocks uses, with a broker that grants every lock."""

    client_id = "c"

    def __init__(self) -> None:
        self.brokers = self.remoting = self
        self.restart()

    def restart(self) -> None:
        """Replace the connection, as a restart of the broker does."""
        self.to_broker = types.SimpleNamespace(closed=False)

    def connection(self, addr: str) -> object:
        return self.to_broker

    async def find_master(self, queue: MessageQueue) -> str:
        return "127.0.0.1:1"

    async def lock_queues(
        self, addr: str, group: str, client_id: str, queues: Iterable[MessageQueue]
    ) -> set[MessageQueue]:
        return set(queues)

    async def unlock_queues(self, *_: object) -> None:
        pass


async def test_after_a_restart_only_what_was_locked_anew_is_believed() -> None:
    """The restarted broker may grant the queue that was not locked again to any member."""
    client = Client()
    locks = QueueLocks(client, "G", lambda lost: None)  # type: ignore[arg-type]
    assert await locks.acquire(QUEUES) == set(QUEUES)
    client.to_broker.closed = True
    assert [locks.holds(queue) for queue in QUEUES] == [False, False]
    client.restart()
    await locks.acquire(QUEUES[:1])
    assert [locks.holds(queue) for queue in QUEUES] == [True, False]
    await locks.acquire(QUEUES[1:])
    assert [locks.holds(queue) for queue in QUEUES] == [True, True]
    await locks.unlock(QUEUES[:1])
    assert [locks.holds(queue) for queue in QUEUES] == [False, True]
    await locks.close()
