"""Operations on messages: search, reading, sending, dead letters, delayed messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import msgspec

from cometmq.admin import dead_letters
from cometmq.admin.dead_letters import Resending, ResendResult, Selection
from cometmq.admin.errors import DeadLettersHidden
from cometmq.admin.messages import ReadRange, StoredMessages
from cometmq.admin.servers import ask_each
from cometmq.admin.topic_admin import TopicAdmin
from cometmq.admin.values import DeadLetterCount, QueueStatus, SendTime
from cometmq.client.cluster import lookups
from cometmq.client.cluster.options import ClientOptions, TraceOptions
from cometmq.client.cluster.requests import NameServersUnreachable
from cometmq.client.cluster.workers import for_each
from cometmq.client.producer.producer import Producer
from cometmq.errors import CometError, NoRouteError
from cometmq.message import Message, MessageExt, MessageQueue, SendResult, WaitingMessage
from cometmq.protocol.codes import DLQ_PREFIX, Perm
from cometmq.protocol.headers import ListTimersRequestHeader
from cometmq.protocol.sql import compile_sql

ADMIN_GROUP = "admin_ext_group"


class MessageAdmin(TopicAdmin, StoredMessages):
    """Operations on messages."""

    _access: ClientOptions
    _producer: Producer | None

    # -- search and reading

    async def message_by_id(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """Return a stored message by its id.

        Args:
            msg_id: An offset id, which contains the broker's address, or a unique key, which producers
                assign.
            topic: Topic in which a unique key is searched. None: all topics except retry, dead-letter and
                system topics.

        Raises:
            MessageNotFound: No broker has the message.
            IdError: `msg_id` is not a message id.
        """
        return await lookups.by_id(self.client, msg_id, topic)

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        limit: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        missing: dict[str, CometError] | None = None,
    ) -> list[MessageExt]:
        """Return the messages of a topic that have a key, the oldest first.

        Args:
            key: The key, one of those that the producer set.
            begin_ms: Only messages stored at or after this time.
            end_ms: Only messages stored at or before this time.
        """
        span = (begin_ms, end_ms)
        return await lookups.by_key(self.client, topic, key, limit, unique=False, span=span, missing=missing)

    async def messages_by_unique_key(
        self, topic: str, msg_id: str, limit: int = 32, *, missing: dict[str, CometError] | None = None
    ) -> list[MessageExt]:
        """Return the messages of a topic that have a unique key. After retries of a send there are several.

        Args:
            msg_id: Unique key: the message id that a producer returns.
        """
        return await lookups.by_key(self.client, topic, msg_id, limit, unique=True, missing=missing)

    async def send_times(self, topic: str, amount: int, size: int) -> AsyncIterator[SendTime]:
        """Send messages to a topic one after the other, queue by queue, and measure each send.

        The first message creates the topic where the brokers create topics automatically.

        Args:
            size: Size of each body, in bytes.

        Yields:
            Duration and result of each send. A failed send is yielded with its error.

        Raises:
            NoRouteError: No name server answers.
        """
        queues: list[MessageQueue] = []
        try:
            queues = [
                MessageQueue(topic, data.broker_name, queue_id)
                for data in sorted((await self.route(topic)).queue_datas, key=lambda data: data.broker_name)
                if data.perm & Perm.WRITE
                for queue_id in range(data.write_queue_nums)
            ]
        except NameServersUnreachable:
            raise
        except NoRouteError:
            pass
        producer = await self._started_producer()
        for number in range(amount):
            queue = queues[number % len(queues)] if queues else None
            began = time.perf_counter()
            sent, result, place, ids = True, "", ("", -1), ("", "", -1)
            try:
                done = await producer.send(Message(topic=topic, body=b"a" * size), queue=queue)
                queue, result = done.queue, done.status.name
                ids = done.msg_id, done.offset_msg_id, done.queue_offset
            except CometError as error:
                sent, result = False, str(error)
            millis = (time.perf_counter() - began) * 1000
            if queue is not None:
                place = queue.broker_name, queue.queue_id
            yield SendTime(place[0], place[1], sent, result, millis, ids[0], ids[1], ids[2])

    async def send(
        self,
        message: Message,
        *,
        broker_name: str | None = None,
        queue_id: int | None = None,
        traced: bool = False,
    ) -> SendResult:
        """Send a message.

        Args:
            broker_name: Broker of the target queue. Has an effect only together with `queue_id`.
            queue_id: Id of the target queue. None: the producer selects the queue.
            traced: Write trace records of the send to the trace topic.

        Raises:
            NoRouteError: No name server has the topic, and no broker creates it.
            MessageIllegal: The message or its topic is not valid.
        """
        queue = None
        if broker_name is not None and queue_id is not None:
            queue = MessageQueue(message.topic, broker_name, queue_id)
        if traced:
            options = replace(self._access, trace=TraceOptions())
            async with Producer(ADMIN_GROUP, namesrv=self._namesrv, client_options=options) as producer:
                return await producer.send(message, queue=queue)
        return await (await self._started_producer()).send(message, queue=queue)

    async def send_again(self, message: MessageExt) -> SendResult:
        """Send a stored message as a new message with the same body, flag, tag, keys and user properties."""
        return await self.send(
            Message(
                topic=message.topic,
                body=bytes(message.body),
                tags=message.tags,
                keys=message.keys,
                flag=message.flag,
                properties=message.user_properties,
            )
        )

    # -- dead letters

    async def dead_letter_counts(self, groups: Iterable[str] | None = None) -> list[DeadLetterCount]:
        """Return the number of dead letters of groups.

        Args:
            groups: The consumer groups. None: all groups that have a dead-letter topic.

        Returns:
            One value per group. `problem` holds the error where the topic cannot be read.
        """
        if groups is None:
            topics = [topic for topic in await self.topics() if topic.startswith(DLQ_PREFIX)]
        else:
            topics = [DLQ_PREFIX + group for group in groups]
        return await for_each(topics, self._dead_letter_count, lookups.TOPICS_AT_ONCE)

    async def _dead_letter_count(self, topic: str) -> DeadLetterCount:
        queues: list[QueueStatus] = []
        problem = ""
        try:
            queues = await self.topic_status(topic)
        except CometError as error:
            problem = str(error)
        return DeadLetterCount(
            group=topic.removeprefix(DLQ_PREFIX),
            count=sum(queue.max_offset - queue.min_offset for queue in queues),
            last_update_timestamp=max((queue.last_update_timestamp for queue in queues), default=0),
            problem=problem,
        )

    async def dead_letters(self, wanted: Selection) -> AsyncIterator[MessageExt]:
        """Yield the selected dead letters of a group, broker by broker, the oldest first.

        Raises:
            DeadLettersHidden: The dead-letter topic is not readable at a broker.
            SqlError: The SQL expression is not valid.
        """
        topic = DLQ_PREFIX + wanted.group
        passes = compile_sql(wanted.sql).matches if wanted.sql is not None else None
        try:
            route = await self.route(topic)
        except NoRouteError:
            await self.brokers_of(wanted.group)
            return
        hidden = sorted(data.broker_name for data in route.queue_datas if not data.perm & Perm.READ)
        if hidden:
            raise DeadLettersHidden(topic, hidden)
        span = ReadRange(topic=topic, begin_ms=wanted.begin_ms, end_ms=wanted.end_ms, count=None)
        async for message in self.read(span):
            if wanted.takes(message) and (passes is None or passes(message.properties.get)):
                yield message

    def resend(self, wanted: Selection, how: Resending) -> AsyncIterator[ResendResult]:
        """Resend dead letters, except those that were resent before, and yield the outcome of each.

        Raises:
            IndexSilent: A broker's index cannot report which dead letters were resent before.
            ResendStopped: Ten sends in a row failed, or the first copy became a dead letter immediately.
            DeadLettersHidden: The dead-letter topic is not readable at a broker.
            SqlError: The SQL expression is not valid.
        """
        return dead_letters.resend(self.client, self.dead_letters(wanted), wanted.group, how)

    async def was_resent(self, group: str, message: MessageExt) -> bool:
        """Return whether a dead letter of a group was resent.

        Raises:
            IndexSilent: A broker's index cannot report that.
        """
        return await dead_letters.was_resent(self.client, group, message)

    # -- timer messages

    async def timers(
        self, topic: str | None = None, *, broker_addr: str | None = None, limit: int | None = None
    ) -> AsyncIterator[WaitingMessage]:
        """Yield the messages that wait for a delivery time or a delay level (CometMQ brokers only).

        Args:
            limit: Maximum number of messages of each broker. None: no limit.

        Yields:
            The messages, broker by broker, in the order of their delivery times.
        """
        for name, addr in (await self._waiting_at(broker_addr)).items():
            wanted = ListTimersRequestHeader(topic=topic)
            more, left = True, limit
            while more and left != 0:
                if left is not None:
                    wanted = msgspec.structs.replace(wanted, max_msg_nums=min(left, 64))
                found, page = await self.client.brokers.timers(addr, name, wanted)
                for waiting in found:
                    yield waiting
                more, left = page.more, None if left is None else left - len(found)
                wanted = msgspec.structs.replace(
                    wanted, after_ms=page.after_ms, after_position=page.after_position
                )

    async def timers_with_key(
        self,
        key: str,
        topic: str | None = None,
        *,
        broker_addr: str | None = None,
        missing: dict[str, CometError] | None = None,
    ) -> tuple[list[WaitingMessage], bool]:
        """Return the delayed, undelivered messages that have a key or an id (CometMQ brokers only).

        Each broker examines at most the newest 64 messages with the key, and at most 1 MiB of them.

        Args:
            key: A key, or the unique key of the message.

        Returns:
            The messages, and whether a broker has more messages with the key than it examined.
        """
        wanted = ListTimersRequestHeader(topic=topic, key=key)
        answers = await ask_each(
            await self._waiting_at(broker_addr),
            lambda name, addr: self.client.brokers.timers(addr, name, wanted),
            missing,
        )
        found = [waiting for some, _ in answers.values() for waiting in some]
        return found, any(page.more for _, page in answers.values())

    async def _waiting_at(self, broker_addr: str | None) -> dict[str, str]:
        """Return the address of the given broker, or if it is None those of all masters, by broker name.

        The name of a given broker that is not a master is "".
        """
        masters = await self.masters()
        if broker_addr is None:
            return masters
        return {next((name for name, addr in masters.items() if addr == broker_addr), ""): broker_addr}

    async def recall(self, recall_handle: str) -> str:
        """Recall a message that waits for its delivery time.

        Args:
            recall_handle: Handle of the message, from its SendResult.

        Returns:
            The message id. The broker does not report whether the message was still waiting.

        Raises:
            BadHandle: The handle is not valid.
        """
        return await (await self._started_producer()).recall(recall_handle)

    async def _started_producer(self) -> Producer:
        if self._producer is None:
            self._producer = Producer(ADMIN_GROUP, client=self.client)
            await self._producer.start()
        return self._producer
