"""Members of a group that pop, and a watch over their leases.

The watch knows only what the members know: when they sent a request and when they received its response. It
reports an overlap of leases only if the leases overlap at every time between the two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tests.simulation.clients import GROUP, TOPIC, TRIES, Clients, name_of, started
from tests.simulation.scheduler import Process

from cometmq.client import ConsumeFromWhere, SimpleConsumer, SimpleOptions
from cometmq.client.simple.leases import receipt_of
from cometmq.errors import CometError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.pop import TopicKind

WAIT_S = 0.3
"""How long, in seconds, a member waits for messages. The watch is blind for this part of a lease."""
_LEASES_S = (1.0, 1.5, 3.0)
_ROUNDING_S = 0.002
"""How much shorter than requested, in seconds, a lease may be: brokers count in milliseconds."""

Epochs = Mapping[str, object]
"""By name of a broker, a value that changes if the broker may have lost its leases."""


class Place(NamedTuple):
    """Where a message was found: a copy in the retry topic has another place."""

    broker: str
    kind: TopicKind
    queue_id: int
    offset: int


@dataclass(eq=False)
class Lease:
    """A lease as its member knows it.

    Attributes:
        begun: Time at which it had certainly begun.
        lasts: Time until which it certainly lasts.
        epoch: The epoch of the broker, or None if it changed during the request.
        acked: Time at which the member knew that the message is acknowledged, or None.
    """

    place: Place
    member: str
    begun: float
    lasts: float
    epoch: object
    acked: float | None = None


class LeaseWatch:
    """Checks the deliveries of all members.

    Args:
        now: Returns the time in seconds.
        epochs: Returns the present epochs.
        tell: Reports a broken guarantee: its name, and what happened.
        ordered: Whether the group consumes in order.
    """

    def __init__(
        self,
        now: Callable[[], float],
        epochs: Callable[[], Epochs],
        tell: Callable[[str, str], None],
        ordered: bool,
    ) -> None:
        self.now = now
        self.epochs = epochs
        self._tell = tell
        self._ordered = ordered
        self._leases: dict[Place, Lease] = {}
        self._by_queue: dict[tuple[str, int], set[Place]] = defaultdict(set)
        self._done: set[Place] = set()  # An acknowledgement was sent
        self.log_is_whole = True
        """Whether no disk has lost stored data; otherwise messages may be missing."""

    def received(
        self, member: str, messages: list[MessageExt], asked: float, lease_s: float, before: Epochs
    ) -> list[Lease]:
        """Check the messages of one response, and return their leases.

        Args:
            member: The name of the member.
            messages: The messages.
            asked: Time of the request.
            lease_s: The requested length of the leases.
            before: The epochs at that time.
        """
        after, leases = self.epochs(), []
        for message in messages:
            handle = receipt_of(message)
            assert handle.offset is not None
            broker = handle.broker_name
            epoch = after[broker] if before[broker] == after[broker] else None
            place = Place(broker, handle.kind, handle.queue_id, handle.offset)
            leases.append(Lease(place, member, self.now(), asked + lease_s - _ROUNDING_S, epoch))
        for lease in leases:
            self._check(lease, asked, leases)
        for lease in leases:
            self._leases[lease.place] = lease
            self._by_queue[lease.place.broker, lease.place.queue_id].add(lease.place)
        return leases

    def _check(self, lease: Lease, asked: float, response: list[Lease]) -> None:
        place = lease.place
        known = self._leases.get(place)
        if known is not None and known.epoch == lease.epoch is not None:
            if known.acked is not None and known.acked < asked:
                self._tell("acked once", f"{place}: acked at {known.acked:.3f}, popped after {asked:.3f}")
            self._check_overlap(known, lease)
        if not self._ordered:
            return
        queue = self._by_queue[place.broker, place.queue_id]
        for other in queue - {each.place for each in response}:
            if self._leases[other].epoch == lease.epoch is not None:
                self._check_overlap(self._leases[other], lease)
        own = {each.place for each in response if each.place.offset < place.offset}
        for offset in range(place.offset if self.log_is_whole else 0):
            if (earlier := place._replace(offset=offset)) not in self._done | own:
                self._tell("fifo", f"{lease.member} has {place}, and nobody has acked {earlier}")

    def _check_overlap(self, first: Lease, second: Lease) -> None:
        if second.begun < first.lasts and first.begun < second.lasts:
            self._tell(
                "leased to one",
                f"{second.place} to {second.member} at {second.begun:.3f}, but {first.place} is leased to "
                f"{first.member} until {first.lasts:.3f}",
            )

    def acking(self, lease: Lease) -> float:
        """Record that an acknowledgement is sent. Return the time until which it is certainly in time.

        Return 0 if the broker may have lost the lease, so that the acknowledgement may have no effect.
        """
        self._done.add(lease.place)
        lasted, lease.lasts = lease.lasts, min(lease.lasts, self.now())
        return lasted if lease.epoch == self.epochs()[lease.place.broker] else 0.0

    def acked(self, lease: Lease, before: Epochs) -> None:
        """Record that the message is certainly acknowledged. `before` are the epochs before the request."""
        broker = lease.place.broker
        after = self.epochs()[broker]
        lease.acked, lease.epoch = self.now(), after if before[broker] == after else None


class PopMembers:
    """Runs the members of a group that pops."""

    def __init__(self, clients: Clients, watch: LeaseWatch, ordered: bool) -> None:
        self._clients = clients
        self._watch = watch
        self._ordered = ordered
        self._chance = clients.chance

    def _make(self, process: Process) -> SimpleConsumer:
        options = SimpleOptions(
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET, orderly=self._ordered, wait_s=WAIT_S
        )
        return SimpleConsumer(
            GROUP, TOPIC, namesrv=self._clients.cluster.namesrv, options=options,
            client_options=self._clients.options(process),
        )  # fmt: skip

    async def consume(self, process: Process) -> None:
        """Run a member until its process is killed. It sometimes leaves the group and joins it again."""
        chance, clients, watch = self._chance, self._clients, self._watch
        consumer = await started(lambda: self._make(process))
        while True:
            before, asked, lease_s = watch.epochs(), watch.now(), chance.choice(_LEASES_S)
            try:
                messages = await consumer.receive(chance.randint(1, 4), invisible_s=lease_s)
            except CometError:
                await asyncio.sleep(0.2)
                continue
            leases = watch.received(process.name, messages, asked, lease_s, before)
            await self._handle_all(consumer, process, list(zip(messages, leases, strict=True)))
            if not clients.patient and chance.random() < 0.05:
                clients.cluster.seen["member left"] += 1
                with contextlib.suppress(CometError):
                    await consumer.stop()
                consumer = await started(lambda: self._make(process))

    async def _handle_all(
        self, consumer: SimpleConsumer, process: Process, popped: list[tuple[MessageExt, Lease]]
    ) -> None:
        """Handle the messages of a response; acknowledge them one by one, or together at the end."""
        together = self._chance.random() < 0.3
        handled: list[tuple[MessageExt, Lease, int]] = []
        stopped: set[int] = set()  # queues of which a message is not done, so that later ones must wait
        for message, lease in popped:
            if self._ordered and lease.place.queue_id in stopped:
                continue
            call = self._begin(process, message)
            await asyncio.sleep(self._chance.choice((0.0, 0.001, 0.05, 0.4)))
            if not await self._is_consumed(consumer, message, lease):
                self._clients.history.fail(call)
                stopped.add(lease.place.queue_id)
                continue
            handled.append((message, lease, call))
            if not together:
                await self._ack(consumer, handled)
                handled = []
        await self._ack(consumer, handled)

    def _begin(self, process: Process, message: MessageExt) -> int:
        place = {}
        if message.reconsume_times == 0:
            queue = name_of(MessageQueue(TOPIC, receipt_of(message).broker_name, message.queue_id))
            place = {"topic": TOPIC, "queue": queue, "offset": message.queue_offset}
        return self._clients.history.begin(
            "handle", process=process.name, group=GROUP, message=_body(message), **place
        )

    async def _is_consumed(self, consumer: SimpleConsumer, message: MessageExt, lease: Lease) -> bool:
        """Return whether to acknowledge a message. Others are given back, or their leases expire."""
        body, chance, clients = _body(message), self._chance, self._clients
        number = int(body[1:]) if body[1:].isdigit() else 0
        hopeless = not self._ordered and number % 7 == 3
        fate = chance.random()
        if hopeless and message.reconsume_times >= TRIES:
            clients.handled.add(body)
            clients.hopeless.add(body)
        if not hopeless and (clients.patient or fate < 0.8):
            return True
        if fate < 0.5 or fate > 0.9:
            lasts_s = chance.choice((0.0, 0.5, 2.0))
            sent, lease.lasts = self._watch.now(), min(lease.lasts, self._watch.now())
            with contextlib.suppress(CometError):
                await consumer.change_invisibility(message, lasts_s)
                lease.lasts = sent + lasts_s - _ROUNDING_S
        return False

    async def _ack(self, consumer: SimpleConsumer, handled: list[tuple[MessageExt, Lease, int]]) -> None:
        """Acknowledge messages. The response to several acks does not tell which ones were too late."""
        watch = self._watch
        until = [watch.acking(lease) for _, lease, _ in handled]
        before = watch.epochs()
        # If its member is killed before the response, an ack may have taken effect, so that nobody else
        # receives the message. Therefore the message counts as handled, whatever the response will be.
        for message, _, call in handled:
            self._clients.history.ok(call)
            self._clients.handled.add(_body(message))
        try:
            if handled:
                await consumer.ack(*(message for message, _, _ in handled))
        except CometError:
            return
        for (_, lease, _), lasted in zip(handled, until, strict=True):
            if len(handled) == 1 or watch.now() < lasted:
                watch.acked(lease, before)


def _body(message: MessageExt) -> str:
    return message.body.rstrip(b".").decode(errors="replace")
