"""The clients of a run: they use the real client and record their operations in the run's history."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from tests.simulation.cluster import Cluster
from tests.simulation.scheduler import START_S, Process

from cometmq.client import (
    ClientOptions,
    ConsumeContext,
    ConsumeFromWhere,
    ConsumeStatus,
    OrderlyStatus,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushOptions,
    SimpleConsumer,
    TransactionProducer,
)
from cometmq.errors import CometError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, SendStatus, TransactionState
from cometmq.testing import History

C = TypeVar("C", Producer, PushConsumer, SimpleConsumer)
TOPIC, GROUP = "T", "g"
TRIES = 2
_CLIENT: dict[str, Any] = {"route_interval_s": 2.0, "heartbeat_interval_s": 5.0, "api_timeout_s": 1.5}


class Clients:
    """Producers and the members of one group. `kind` is the kind of messages, see `KINDS`."""

    def __init__(self, cluster: Cluster, kind: str) -> None:
        self.cluster = cluster
        self.kind = kind
        self.chance = random.Random(f"clients {cluster.scheduler.seed}")
        self.on_ack: Callable[[SendResult], None] = lambda _result: None
        """Called for each message that is certainly stored in its topic."""
        self.history = History(clock=cluster.scheduler.time)
        self.acked: set[str] = set()
        """Ids of messages that the group must receive."""
        self.stored_for_sure: set[str] = set()
        """Ids of messages that were acknowledged with SEND_OK and are stored in the topic itself."""
        self.handled: set[str] = set()
        self.hopeless: set[str] = set()
        """Ids of handled messages that become dead letters."""
        self.open: set[str] = set()
        """Ids of transactions without a decision."""
        self.members: list[Process] = []
        self.sending = 0
        """Number of producers that still have messages to send."""
        self.fails = kind == "retries"
        self.patient = False
        """Whether members that pop acknowledge every message that can be consumed."""
        self.paddings: tuple[int, ...] = (0, 10, 17, 60, 200)
        """Lengths of the padding of bodies, in bytes."""
        self._numbers = 0
        self._decided: set[str] = set()
        self._owned: dict[tuple[str, MessageQueue], int] = {}

    @property
    def done(self) -> bool:
        """Whether everything has been sent and the group has received every acknowledged message."""
        return not (self.sending or self.open) and self.acked <= self.handled

    def options(self, process: Process) -> ClientOptions:
        """Return the options of a client of this process."""
        return ClientOptions(client_ip=process.host, instance_name=process.name, **_CLIENT)

    # -- producers

    async def produce(self, process: Process, count: int, pause_s: float) -> None:
        """Send `count` messages, one after the other."""
        self.sending += 1
        options = ProducerOptions(send_timeout_s=1.5, default_topic_queue_nums=2, retry_times=2)
        given: dict[str, Any] = {
            "namesrv": self.cluster.namesrv, "options": options, "client_options": self.options(process),
        }  # fmt: skip
        if self.kind == "transactions":
            producer: Producer = await started(
                lambda: TransactionProducer("p", _Transactions(self), topics=[TOPIC], **given)
            )
        else:
            producer = await started(lambda: Producer("p", **given))
        for _ in range(count):
            await self._send(producer, process)
            await asyncio.sleep(self.chance.uniform(0, 2 * pause_s))
        self.sending -= 1

    async def _send(self, producer: Producer, process: Process) -> None:
        self._numbers += 1
        message_id = f"m{self._numbers}"
        message = Message(TOPIC, message_id.encode() + b"." * self.chance.choice(self.paddings))
        facts: dict[str, Any] = {}
        if self.kind == "timers":
            delay_ms = self.chance.choice((500, 1200, 3000))
            if self.chance.random() < 0.5:
                message.delay_ms = delay_ms
            else:
                message.deliver_at_ms = int((START_S + self.cluster.scheduler.now) * 1000) + delay_ms
            facts["due"] = self.cluster.scheduler.now + delay_ms / 1000
        half = self.kind == "transactions"
        sending = self.history.begin(
            "send", process=process.name, message=message_id, topic=TOPIC, half=half, **facts
        )
        try:
            if isinstance(producer, TransactionProducer):
                result = await producer.send_in_transaction(message, message_id, timeout_s=1.5)
            else:
                result = await producer.send(message)
        except CometError:
            self.history.unknown(sending)
            await asyncio.sleep(0.1)
            return
        if result.status is not SendStatus.SEND_OK:
            self.history.unknown(sending)
            return
        place: dict[str, Any] = {}
        if not half and not message.is_delayed:
            place = {"queue": name_of(result.queue), "offset": result.queue_offset}
            self.stored_for_sure.add(message_id)
            self.on_ack(result)
        self.history.ok(sending, **place)
        if not half:
            self.acked.add(message_id)
        elif not self.decided(message_id):
            self.open.add(message_id)

    def decided(self, message_id: str) -> bool:
        return message_id in self._decided

    def decide(self, message_id: str) -> None:
        """Record that the outcome of a message's transaction is decided."""
        self._decided.add(message_id)
        self.open.discard(message_id)

    # -- members

    async def consume(self, process: Process, *, orderly: bool = False) -> None:
        """Run a member of the group until its process is killed."""

        async def listener(messages: list[MessageExt], context: ConsumeContext) -> ConsumeStatus:
            (message,) = messages
            return await self._handle(process, message, context)

        async def in_order(messages: list[MessageExt]) -> OrderlyStatus:
            (message,) = messages
            await self._handle(process, message, None)
            return OrderlyStatus.SUCCESS

        options = PushOptions(
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            orderly=orderly,
            rebalance_interval_s=2.0,
            broker_suspend_s=2.0,
            suspend_timeout_s=3.0,
            persist_interval_s=1.0,
            pull_error_delay_s=0.2,
            handover_timeout_s=1.0,
            max_reconsume_times=None if orderly else TRIES,
            queue_listener=lambda topic, _all, mine: self._owns(process, topic, mine),
        )
        await started(
            lambda: PushConsumer(
                GROUP, in_order if orderly else listener, TOPIC, namesrv=self.cluster.namesrv,
                options=options, client_options=self.options(process),
            )
        )  # fmt: skip

    async def _handle(
        self, process: Process, message: MessageExt, context: ConsumeContext | None
    ) -> ConsumeStatus:
        body = message.body.rstrip(b".").decode(errors="replace")
        place: dict[str, Any] = {}
        if message.reconsume_times == 0 and self.kind != "timers":
            place = {
                "topic": message.topic, "queue": name_of(message.queue), "offset": message.queue_offset,
                "key": name_of(message.queue) if context is None else "",
            }  # fmt: skip
        call = self.history.begin("handle", process=process.name, group=GROUP, message=body, **place)
        await asyncio.sleep(self.chance.choice((0.0, 0.001, 0.05, 0.4)))
        number = int(body[1:]) if body[1:].isdigit() else 0
        hopeless = self.fails and number % 7 == 3
        if hopeless or (self.fails and number % 3 == 0 and message.reconsume_times < number % TRIES + 1):
            self.history.fail(call)
            if context is not None:
                context.delay_level = 1
            if hopeless and message.reconsume_times >= TRIES:
                self.handled.add(body)
                self.hopeless.add(body)
            return ConsumeStatus.RECONSUME_LATER
        self.history.ok(call)
        self.handled.add(body)
        return ConsumeStatus.SUCCESS

    def _owns(self, process: Process, topic: str, queues: tuple[MessageQueue, ...]) -> None:
        if topic != TOPIC:
            return
        for who, queue in [key for key in self._owned if key[0] == process.name and key[1] not in queues]:
            self.history.ok(self._owned.pop((who, queue)))
        for queue in queues:
            if (process.name, queue) not in self._owned:
                self._owned[process.name, queue] = self.history.begin(
                    "own", process=process.name, group=GROUP, topic=topic, queue=name_of(queue)
                )

    @property
    def owned(self) -> Counter[str]:
        """The number of members that own each queue."""
        return Counter(name_of(queue) for _, queue in self._owned)

    def kill_member(self, process: Process) -> None:
        """End a member immediately."""
        self.members.remove(process)
        process.kill()
        self.cluster.network.lose_process(process, silently=False)
        self.cluster.seen["member killed"] += 1
        self.history.died(process.name)
        for key in [key for key in self._owned if key[0] == process.name]:
            del self._owned[key]


class _Transactions:
    """Local transactions. The number decides the outcome, and some are decided only at a broker's check."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients

    def _state(self, message_id: str) -> TransactionState:
        if int(message_id[1:]) % 3 == 1:
            state, outcome = TransactionState.ROLLBACK, "rollback"
        else:
            state, outcome = TransactionState.COMMIT, "commit"
            self._clients.acked.add(message_id)
        if not self._clients.decided(message_id):
            self._clients.decide(message_id)
            self._clients.history.note("end", message=message_id, outcome=outcome)
        return state

    async def execute_local_transaction(self, message: MessageExt, argument: Any) -> TransactionState:
        if int(argument[1:]) % 4 == 0:
            return TransactionState.UNKNOWN
        return self._state(argument)

    async def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return self._state(message.body.rstrip(b".").decode())


async def started(make: Callable[[], C]) -> C:
    """Start a client, and try new ones until a start succeeds, as a program does that needs the client."""
    while True:
        client = make()
        try:
            await client.start()
        except CometError:
            await asyncio.sleep(0.2)
        else:
            return client


def name_of(queue: MessageQueue) -> str:
    """Return the name of a queue as used in histories."""
    return f"{queue.broker_name}:{queue.queue_id}"
