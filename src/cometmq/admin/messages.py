"""Search and reading of stored messages."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import msgspec

from cometmq import logs
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.servers import ServerAdmin
from cometmq.admin.values import TraceView
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import MAX_UNIQUE_HITS, broker_addrs, by_id, by_key
from cometmq.client.cluster.requests import NameServersUnreachable, pull_request
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import MessageExt, MessageQueue, PullStatus
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import (
    TOOLS_CONSUMER_GROUP,
    TRACE_TOPIC,
    TRANS_CHECK_MAX_TIME_TOPIC,
    Perm,
    RequestCode,
)
from cometmq.protocol.headers import ResumeCheckHalfMessageRequestHeader
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.traces import traces_about
from cometmq.text import counted

log = logs.logger(__name__)

PULL_BATCH = 32
MAX_TRACES = 10_000  # Maximum number of trace records read for one message


class ReadRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of a topic's stored messages.

    Attributes:
        topic: The topic.
        broker_name: Only queues of this broker.
        queue_id: Only queues with this id.
        offset: First offset of each queue.
        begin_ms: Only messages stored at or after this time (ms since 1970).
        end_ms: Only messages stored before this time (ms since 1970).
        count: Maximum number of messages. None: no limit.
        expression: Tags as a consumer subscribes them: "*", or "TagA || TagB".
    """

    topic: str
    broker_name: str | None = None
    queue_id: int | None = None
    offset: int | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    count: int | None = 128
    expression: str = "*"

    @property
    def tags(self) -> set[str]:
        """The selected tags; empty for all tags."""
        words = {word.strip() for word in self.expression.split("||")}
        return set() if words & {"", "*"} else words


class StoredMessages(ServerAdmin):
    """Operations that search and read stored messages."""

    async def resume_check(self, msg_id: str) -> MessageExt:
        """Resume the transaction checks of a half message whose checks have reached their maximum.

        Args:
            msg_id: Offset id of the message, or the unique key that its producer assigned.

        Returns:
            The resumed message, as it was stored in TRANS_CHECK_MAX_TIME_TOPIC.

        Raises:
            MessageNotFound: There is no such half message.
            BrokerError: The broker refuses, for example because the checks were resumed before.
            IdError: `msg_id` is not a message id.
        """
        topic = TRANS_CHECK_MAX_TIME_TOPIC
        try:
            found = await by_key(self.client, topic, msg_id, MAX_UNIQUE_HITS, unique=True)
            message = found[-1] if found else await by_id(self.client, msg_id, topic)
        except NameServersUnreachable:
            raise
        except NoRouteError:
            raise MessageNotFound(msg_id, f"in topic {topic}, which no broker has") from None
        place = decode_offset_id(message.offset_msg_id)
        header = ResumeCheckHalfMessageRequestHeader(msg_id=message.offset_msg_id, topic=topic)
        await self.client.brokers.call(place.host, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
        return message

    async def traces(
        self,
        msg_id: str,
        topic: str = TRACE_TOPIC,
        limit: int = 64,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        missing: dict[str, CometError] | None = None,
    ) -> list[TraceView]:
        """Return the trace records of a message, the oldest first.

        Args:
            msg_id: Unique key of the message. The ids of a batch are joined by commas.
            topic: The trace topic.
            limit: Maximum number of trace messages read from each broker.
            begin_ms: Only trace messages stored at or after this time.
            end_ms: Only trace messages stored at or before this time.
            missing: Receives the error of each broker that fails, by broker name. None: the first error is
                raised.

        Returns:
            The records, at most 10,000.

        Raises:
            NoRouteError: No name server has the trace topic.
            CometError: A broker fails and `missing` is None, or all brokers fail.
        """
        found: list[TraceView] = []
        span = begin_ms, end_ms
        for message in await by_key(
            self.client, topic, msg_id, limit, unique=False, span=span, missing=missing
        ):
            unreadable: list[str] = []
            for trace in traces_about(bytes(message.body), msg_id, unreadable):
                if len(found) == MAX_TRACES:
                    log.warning(
                        "message %s has more than %d trace messages; only the first are shown",
                        msg_id,
                        MAX_TRACES,
                    )
                    return found
                host = message.born_host.rpartition(":")[0]
                found.append(
                    TraceView(trace=trace, client_host=host, store_timestamp=message.store_timestamp_ms)
                )
            if unreadable:
                log.warning(
                    "%s of %s could not be read; the first error: %s",
                    counted(len(unreadable), "record"), message.offset_msg_id, unreadable[0],
                )  # fmt: skip
        if not found and "," in msg_id:
            # `msg_id` contains the ids of a whole batch, joined by commas. Java's clients write one trace
            # record for these joined ids, but other clients write one for each message. As the first search
            # found nothing, search each id.
            for each in msg_id.split(","):
                found += await self.traces(
                    each.strip(), topic, limit, begin_ms=begin_ms, end_ms=end_ms, missing=missing
                )
        return found

    async def read(self, wanted: ReadRange, group: str | None = None) -> AsyncIterator[MessageExt]:
        """Yield the messages of a range, queue by queue. No offset is committed.

        Args:
            wanted: Topic, queues, times and maximum number of messages.
            group: Consumer group of the pull requests. None: TOOLS_CONSUMER.

        Raises:
            NoRouteError: No name server has the topic.
            UnknownNameError: The topic has no such broker or queue.
        """
        route = await self.client.namesrv.route(wanted.topic)
        addrs = broker_addrs(route)
        left = sys.maxsize if wanted.count is None else wanted.count
        tags = wanted.tags
        for queue in queues_of(route, wanted):
            addr = addrs[queue.broker_name]
            start, end = await bounds(self.client, addr, queue, wanted)
            while start < end and left > 0:
                request = pull_request(
                    group or TOOLS_CONSUMER_GROUP,
                    queue,
                    start,
                    min(PULL_BATCH, left, end - start),
                    wanted.expression,
                )
                result = await self.client.brokers.pull(addr, queue, request)
                if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= start:
                    break
                start = result.next_begin_offset
                for message in result.messages:
                    if wanted.end_ms is not None and message.store_timestamp_ms >= wanted.end_ms:
                        start = end  # End the read, because all later messages are newer than the range
                        break
                    if tags and message.tags not in tags:
                        continue  # The broker compares only hashes of tags, so other tags can match
                    if message.queue_offset < end and message.store_timestamp_ms >= (wanted.begin_ms or 0):
                        left -= 1
                        yield message

    async def queue_bounds(self, wanted: ReadRange) -> AsyncIterator[tuple[MessageQueue, int, int]]:
        """Yield, for each queue of a range, the offsets between which the method `read` would read messages.

        Args:
            wanted: Topic, queues and times.

        Yields:
            The queue, the first offset that is read, and the offset after the queue's last message.

        Raises:
            NoRouteError: No name server has the topic.
            UnknownNameError: The topic has no such broker or queue.
        """
        route = await self.client.namesrv.route(wanted.topic)
        addrs = broker_addrs(route)
        for queue in queues_of(route, wanted):
            yield queue, *await bounds(self.client, addrs[queue.broker_name], queue, wanted)

    async def message_at(self, topic: str, broker_name: str, queue_id: int, offset: int) -> MessageExt:
        """Return the message at an offset of a queue.

        Raises:
            MessageNotFound: The queue has no message at this offset.
            UnknownNameError: The topic has no such broker.
            NoRouteError: No name server has the topic.
        """
        addrs = broker_addrs(await self.client.namesrv.route(topic))
        if broker_name not in addrs:
            raise UnknownNameError("broker", broker_name, sorted(addrs))
        queue = MessageQueue(topic, broker_name, queue_id)
        request = pull_request(TOOLS_CONSUMER_GROUP, queue, offset, 1)
        found = (await self.client.brokers.pull(addrs[broker_name], queue, request)).messages
        if not found or found[0].queue_offset != offset:
            raise MessageNotFound(str(offset), f"in queue {queue_id} of topic {topic} at {broker_name}")
        return found[0]


def queues_of(route: TopicRouteData, wanted: ReadRange) -> list[MessageQueue]:
    """Return those readable queues of a topic that `wanted` selects, sorted by broker name and queue id.

    Raises UnknownNameError if the selected broker or queue does not exist.
    """
    counts = {data.broker_name: data.read_queue_nums for data in route.queue_datas if data.perm & Perm.READ}
    if wanted.broker_name is not None:
        if wanted.broker_name not in counts:
            raise UnknownNameError("broker", wanted.broker_name, sorted(counts))
        counts = {wanted.broker_name: counts[wanted.broker_name]}
    queues = [
        MessageQueue(wanted.topic, name, i) for name, count in sorted(counts.items()) for i in range(count)
    ]
    if wanted.queue_id is None:
        return queues
    chosen = [queue for queue in queues if queue.queue_id == wanted.queue_id]
    if not chosen:
        raise UnknownNameError("queue", str(wanted.queue_id), [str(queue.queue_id) for queue in queues])
    return chosen


async def bounds(
    client: ClientInstance, addr: str, queue: MessageQueue, wanted: ReadRange
) -> tuple[int, int]:
    """Return the offset at which reading a queue begins, and the queue's end offset.

    The caller must drop messages stored before `begin_ms`, because a 4.9 broker finds offsets by time only
    approximately: it returns the message nearest to the time, which may be an older one, or any of several
    messages of the same millisecond.
    """
    first = await client.brokers.min_offset(addr, queue)
    end = await client.brokers.max_offset(addr, queue)
    if wanted.begin_ms:
        first = max(first, await client.brokers.offset_by_time(addr, queue, wanted.begin_ms - 1))
    if wanted.offset is not None:
        first = max(first, wanted.offset)
    return first, end
