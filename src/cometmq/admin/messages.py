"""Search and reading of stored messages."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import msgspec

from cometmq import logs
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import TraceView
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import MAX_UNIQUE_HITS, broker_addrs, by_id, by_key
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.requests import pull_request
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import MessageExt, MessageQueue, PullStatus
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import (
    TOOLS_CONSUMER_GROUP,
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
MAX_TRACES = 10_000  # trace records of one message


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


async def resume_check(client: ClientInstance, msg_id: str) -> MessageExt:
    """Resume the transaction checks of a half message.

    Of several messages with one unique key the newest is selected: the older ones were resumed before. Raises
    as by_id.
    """
    topic = TRANS_CHECK_MAX_TIME_TOPIC
    try:
        found = await by_key(client, topic, msg_id, MAX_UNIQUE_HITS, unique=True)
        message = found[-1] if found else await by_id(client, msg_id, topic)
    except NameServersUnreachable:
        raise
    except NoRouteError:
        raise MessageNotFound(msg_id, f"in topic {topic}, which no broker has") from None
    place = decode_offset_id(message.offset_msg_id)
    header = ResumeCheckHalfMessageRequestHeader(msg_id=message.offset_msg_id, topic=topic)
    await client.brokers.call(place.host, RequestCode.RESUME_CHECK_HALF_MESSAGE, header)
    return message


async def traces(
    client: ClientInstance,
    topic: str,
    msg_id: str,
    limit: int,
    span: tuple[int, int],
    missing: dict[str, CometError] | None = None,
) -> list[TraceView]:
    """Return the trace records of a message from the trace messages with its id as key, the oldest first.

    Java clients record a batch under its ids, joined by commas. If no trace message has that key, the records
    of each single id are returned. `missing` as in by_key.
    """
    found: list[TraceView] = []
    for message in await by_key(client, topic, msg_id, limit, unique=False, span=span, missing=missing):
        unreadable: list[str] = []
        for trace in traces_about(bytes(message.body), msg_id, unreadable):
            if len(found) == MAX_TRACES:
                log.warning("message %s has more traces: these are the first %d", msg_id, MAX_TRACES)
                return found
            host = message.born_host.rpartition(":")[0]
            found.append(TraceView(trace=trace, client_host=host, store_timestamp=message.store_timestamp_ms))
        if unreadable:
            log.warning(
                "%s of %s cannot be read, the first: %s",
                counted(len(unreadable), "record"), message.offset_msg_id, unreadable[0],
            )  # fmt: skip
    if not found and "," in msg_id:
        for each in msg_id.split(","):
            found += await traces(client, topic, each.strip(), limit, span, missing)
    return found


async def read(
    client: ClientInstance, wanted: ReadRange, group: str | None = None
) -> AsyncIterator[MessageExt]:
    """Yield the messages of the range, queue by queue.

    Raises UnknownNameError for a missing broker or queue.
    """
    route = await client.namesrv.route(wanted.topic)
    addrs = broker_addrs(route)
    left = sys.maxsize if wanted.count is None else wanted.count
    tags = wanted.tags
    for queue in queues_of(route, wanted):
        addr = addrs[queue.broker_name]
        start, end = await bounds(client, addr, queue, wanted)
        while start < end and left > 0:
            request = pull_request(
                group or TOOLS_CONSUMER_GROUP,
                queue,
                start,
                min(PULL_BATCH, left, end - start),
                wanted.expression,
            )
            result = await client.brokers.pull(addr, queue, request)
            if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= start:
                break
            start = result.next_begin_offset
            for message in result.messages:
                if wanted.end_ms is not None and message.store_timestamp_ms >= wanted.end_ms:
                    start = end  # Store times increase along a queue: no later message is older.
                    break
                if tags and message.tags not in tags:
                    continue  # The broker compares only the hashes of tags.
                if message.queue_offset < end and message.store_timestamp_ms >= (wanted.begin_ms or 0):
                    left -= 1
                    yield message


async def queue_bounds(
    client: ClientInstance, wanted: ReadRange
) -> AsyncIterator[tuple[MessageQueue, int, int]]:
    """Yield each queue of the range, the offset at which reading begins, and the end offset.

    Raises as `read`.
    """
    route = await client.namesrv.route(wanted.topic)
    addrs = broker_addrs(route)
    for queue in queues_of(route, wanted):
        yield queue, *await bounds(client, addrs[queue.broker_name], queue, wanted)


async def at_offset(client: ClientInstance, queue: MessageQueue, offset: int) -> MessageExt | None:
    """Return the message at an offset of a queue, None if there is none.

    Raises NoRouteError, UnknownNameError.
    """
    addrs = broker_addrs(await client.namesrv.route(queue.topic))
    if queue.broker_name not in addrs:
        raise UnknownNameError("broker", queue.broker_name, sorted(addrs))
    request = pull_request(TOOLS_CONSUMER_GROUP, queue, offset, 1)
    found = (await client.brokers.pull(addrs[queue.broker_name], queue, request)).messages
    return found[0] if found and found[0].queue_offset == offset else None


def queues_of(route: TopicRouteData, wanted: ReadRange) -> list[MessageQueue]:
    """Return the readable queues of a range, sorted.

    Raises UnknownNameError for a missing broker or queue.
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

    The caller drops messages stored before `begin_ms`: a 4.9 broker returns the message nearest to a time,
    which may be an older one, or any of several messages of the same millisecond.
    """
    first = await client.brokers.min_offset(addr, queue)
    end = await client.brokers.max_offset(addr, queue)
    if wanted.begin_ms:
        first = max(first, await client.brokers.offset_by_time(addr, queue, wanted.begin_ms - 1))
    if wanted.offset is not None:
        first = max(first, wanted.offset)
    return first, end
