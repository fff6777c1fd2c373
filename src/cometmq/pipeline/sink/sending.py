"""The sender of a writing task: at most one batch in flight per queue, several queues concurrently.

Sockets are blocking. A message counts as sent only when the broker has acknowledged it: `flush` returns when
every batch is acknowledged, and raises an error if a batch exhausts its attempts. A batch that is refused
because it contains an illegal message is halved repeatedly, until that message is alone. If a batch was
refused or had no response, the topic's route is looked up once and the batch is sent to the address in the
new route, because the master may have moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from cometmq.client.cluster.requests import NO_ROUTE_HINT, SEND_STATUS, NameServersUnreachable, send_request
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.client.producer.selectors import select_by_hash
from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError
from cometmq.message import MessageQueue
from cometmq.periodic import Backoff
from cometmq.pipeline.base.options import WriteOptions
from cometmq.pipeline.base.wire import Wire
from cometmq.pipeline.live.cluster import Cluster
from cometmq.pipeline.sink.encoded import EncodedRows
from cometmq.pipeline.sink.rows import RowMessage
from cometmq.protocol.batch import encode_batch
from cometmq.protocol.codes import RETRY_PREFIX, ResponseCode
from cometmq.protocol.frame import Frame

_BUSY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.FLOW_CONTROL})
"""Codes of an overloaded broker, which, unlike after other temporary refusals, is still the master."""
_TRY_AGAIN = RETRY_RESPONSE_CODES | _BUSY | {ResponseCode.NOT_LEADER_FOR_QUEUE}
_TOO_LARGE = "size exceeded"
"""Part of 5.x's remark (SYSTEM_ERROR) about a too large batch (docs/reference/remoting.md, Sending)."""
_PAUSE_S, _MAX_PAUSE_S = 0.1, 60.0  # First and maximum pause before a retry, in seconds


@dataclass(slots=True)
class _Batch:
    queue: MessageQueue
    messages: Sequence[RowMessage]
    pinned: bool  # Whether a retry must use the same queue, to keep the order of the messages
    pauses: Backoff = field(default_factory=lambda: Backoff(_PAUSE_S, _MAX_PAUSE_S))


@dataclass(slots=True)
class _Topic:
    """The queues of a topic, and the messages that wait for each queue until its batch is full.

    Messages without a sharding key go to one queue until its batch is full, and then to the next queue. A
    sharding key selects one of the queues in `placed`, which stay the same even if a broker leaves the route.
    """

    queues: Sequence[MessageQueue]
    placed: Sequence[MessageQueue]
    turn: int = 0
    waiting: dict[MessageQueue, list[RowMessage]] = field(default_factory=dict)
    sizes: dict[MessageQueue, int] = field(default_factory=dict)
    pinned: set[MessageQueue] = field(default_factory=set)


class Sender:
    """A sender of messages to any topics. `messages` and `bytes` count acknowledged messages.

    Attributes:
        first_queue: Index of the queue that is filled first. Tasks of a small write have different indexes,
            so that they use different queues.
        on_illegal: Receives the messages that a broker refuses permanently. None: the refusal is raised.
    """

    def __init__(
        self,
        options: WriteOptions,
        first_queue: int = 0,
        on_illegal: Callable[[RowMessage, BrokerError], None] | None = None,
    ) -> None:
        self._options = options
        self._on_illegal = on_illegal
        self._first_queue = first_queue
        self._cluster = Cluster.of(options)
        self._topics: dict[str, _Topic] = {}
        self._wires: dict[str, Wire] = {}
        self._flying: dict[str, dict[int, _Batch]] = {}  # Batches in flight by address and opaque number
        self._busy: dict[MessageQueue, str] = {}  # Address to which each queue's batch in flight was sent
        self.messages = 0
        self.bytes = 0

    def send(self, message: RowMessage, queue: MessageQueue | None = None) -> None:
        """Add a message to the batch of its queue, or of `queue` if given. A full batch is sent."""
        topic = self._topics.get(message.topic) or self._topic(message.topic)
        if queue is not None:
            topic.pinned.add(queue)
        elif message.sharding_key is None:
            queue = topic.queues[topic.turn % len(topic.queues)]
        else:
            queue = select_by_hash(topic.placed, None, message.sharding_key)
            topic.pinned.add(queue)
        # Brokers refuse a batch that contains a delayed message or a message to a retry topic, so each such
        # message is sent alone.
        alone = message.delay_level > 0 or message.topic.startswith(RETRY_PREFIX)
        size = len(message.body) + len(message.properties) + 32
        waiting = topic.waiting.setdefault(queue, [])
        held = topic.sizes.get(queue, 0)
        if waiting and (alone or held + size > self._options.batch_bytes):
            self._dispatch(topic, queue)
            waiting, held = topic.waiting.setdefault(queue, []), 0
        waiting.append(message)
        topic.sizes[queue] = held + size
        if alone or len(waiting) >= self._options.batch_records:
            self._dispatch(topic, queue)

    def send_rows(self, rows: EncodedRows) -> None:
        """Send rows in batches of their own. Messages that wait for the same queue are sent first."""
        topic = self._topics.get(rows.topic) or self._topic(rows.topic)
        for part in rows.parts(self._options.batch_records, self._options.batch_bytes):
            queue = topic.queues[topic.turn % len(topic.queues)]
            if topic.waiting.get(queue):
                self._dispatch(topic, queue)
            self._launch(topic, _Batch(queue, part, queue in topic.pinned))

    def _topic(self, name: str) -> _Topic:
        """Return a topic's queues, with retries: it is unknown while its only broker is unreachable."""
        pauses = Backoff(_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                queues = self._cluster.write_queues(name)
                asked = [(address, "no queue can be written to now") for address in self._options.namesrv]
                failure = NoRouteError(name, asked, NO_ROUTE_HINT)
            except NoRouteError as error:
                queues, failure = (), error
            if queues:
                topic = self._topics[name] = _Topic(queues, queues, self._first_queue)
                return topic
            if pauses.failures >= self._options.retries or isinstance(failure, NameServersUnreachable):
                raise failure
            time.sleep(pauses.next_s())

    def _dispatch(self, topic: _Topic, queue: MessageQueue) -> None:
        messages = topic.waiting.pop(queue)
        topic.sizes[queue] = 0
        self._launch(topic, _Batch(queue, messages, queue in topic.pinned))

    def _launch(self, topic: _Topic, batch: _Batch) -> None:
        topic.turn += 1
        while batch.queue in self._busy:
            self._receive(self._busy[batch.queue])
        self._transmit(batch)

    def _transmit(self, batch: _Batch) -> None:
        try:
            address = self._cluster.master_of(batch.queue)
        except (RemotingError, NoRouteError) as error:
            self._again(batch, error)
            return
        self._busy[batch.queue] = address
        try:
            wire = self._wires.get(address)
            if wire is None:
                wire = self._wires[address] = Wire(
                    address, self._options.timeout_ms / 1000, self._options.access
                )
            opaque = wire.send([_frame(batch, self._options.producer_group)])[0]
        except RemotingError as error:
            self._flying.setdefault(address, {})[-id(batch)] = batch
            self._broken(address, error)
            return
        self._flying.setdefault(address, {})[opaque] = batch

    def _receive(self, address: str) -> None:
        """Receive and process one response of a broker."""
        wire = self._wires[address]
        try:
            frame = wire.receive()
        except RemotingError as error:
            self._broken(address, error)
            return
        batch = self._flying[address].pop(frame.opaque)
        del self._busy[batch.queue]
        if frame.code in SEND_STATUS:
            self.messages += len(batch.messages)
            self.bytes += _body_bytes(batch.messages)
            return
        queue = batch.queue
        refusal = BrokerError(frame.code, remark=frame.remark or "", broker_addr=address, topic=queue.topic)
        illegal = frame.code == ResponseCode.MESSAGE_ILLEGAL or _TOO_LARGE in refusal.remark
        if not illegal and frame.code in _TRY_AGAIN:
            self._again(batch, refusal)
        elif not illegal or self._on_illegal is None:
            raise refusal
        elif len(batch.messages) == 1:
            self._on_illegal(batch.messages[0], refusal)
        else:
            self._halve(batch)

    def _halve(self, batch: _Batch) -> None:
        """Send the two halves of a batch one after the other, in order."""
        middle = len(batch.messages) // 2
        for messages in (batch.messages[:middle], batch.messages[middle:]):
            while batch.queue in self._busy:
                self._receive(self._busy[batch.queue])
            self._transmit(_Batch(batch.queue, messages, batch.pinned))

    def _broken(self, address: str, error: CometError) -> None:
        """Send the batches in flight on a lost connection again, as it is unknown whether they arrived."""
        wire = self._wires.pop(address, None)
        if wire is not None:
            wire.close()
        lost = list(self._flying.pop(address, {}).values())
        for batch in lost:
            self._busy.pop(batch.queue, None)
        for batch in lost:
            self._again(batch, error)

    def _again(self, batch: _Batch, error: CometError) -> None:
        if batch.pauses.failures >= self._options.retries:
            raise error
        time.sleep(batch.pauses.next_s())
        if not isinstance(error, BrokerError) or error.code not in _BUSY:
            self._look(batch.queue.topic)
        if not batch.pinned:
            batch.queue = self._other_queue(batch)
        while batch.queue in self._busy:
            self._receive(self._busy[batch.queue])
        self._transmit(batch)

    def _look(self, name: str) -> None:
        """Look up the topic's route once. If the lookup fails, the topic keeps its queues."""
        with suppress(RemotingError, NoRouteError):
            topic = self._topics[name]
            topic.queues = self._cluster.write_queues(name, wait=False) or topic.queues

    def _other_queue(self, batch: _Batch) -> MessageQueue:
        """Return another queue for a batch, preferably on another broker."""
        queues = self._topics[batch.queue.topic].queues
        elsewhere = [queue for queue in queues if queue.broker_name != batch.queue.broker_name]
        candidates = elsewhere or list(queues)
        return candidates[(batch.queue.queue_id + batch.pauses.failures) % len(candidates)]

    def flush(self) -> None:
        """Send the waiting messages, and return when all messages are acknowledged."""
        for topic in self._topics.values():
            for queue in list(topic.waiting):
                if topic.waiting[queue]:
                    self._dispatch(topic, queue)
        while self._busy:
            self._receive(next(iter(self._busy.values())))

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _frame(batch: _Batch, producer_group: str) -> Frame:
    """Return a send request for a batch, or for a plain message if the batch has only one message."""
    first = batch.messages[0]
    single = len(batch.messages) == 1
    if single:
        body, properties = first.body, first.properties.decode()
        if first.delay_level > 0:
            properties += f"\x02DELAY\x01{first.delay_level}"
    else:
        body = _body_of(batch.messages)
        properties = "WAIT\x01true"
    flag = first.flag if single else 0
    return send_request(
        producer_group, first.topic, batch.queue, body, properties, flag=flag, batch=not single
    )


def _body_of(messages: Sequence[RowMessage]) -> bytes:
    if isinstance(messages, EncodedRows):
        return messages.body
    return encode_batch((item.flag, item.body, item.properties) for item in messages)


def _body_bytes(messages: Sequence[RowMessage]) -> int:
    if isinstance(messages, EncodedRows):
        return messages.body_bytes
    return sum(len(message.body) for message in messages)
