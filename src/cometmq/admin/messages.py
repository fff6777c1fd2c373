"""Finding and reading stored messages."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import msgspec

from cometmq import logs
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import TraceView
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.lookups import UNIQUE_HITS_MAX, broker_addrs, by_id, by_key
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
TRACES_MAX = 10_000  # records about one message


class ReadRange(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, or one broker's or one queue's part of it; times in ms, `count` messages at most (None: all).
    expression: of tags, as consumers subscribe them."""

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
        """The wanted tags, none for all of them."""
        words = {word.strip() for word in self.expression.split("||")}
        return set() if words & {"", "*"} else words


async def resume_check(client: ClientInstance, msg_id: str) -> MessageExt:
    """Have a half message that was given up asked about again. Of messages with one unique key this is the
    newest: those before it were resumed. Raises as by_id."""
    topic = TRANS_CHECK_MAX_TIME_TOPIC
    try:
        found = await by_key(client, topic, msg_id, UNIQUE_HITS_MAX, unique=True)
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
    """The traces of a message in the trace messages that have its id as a key, the oldest first. The ids of a
    batch, joined by commas, are one id to Java's clients; if nobody has it, those of each of its messages.
    missing: as of by_key."""
    found: list[TraceView] = []
    for message in await by_key(client, topic, msg_id, limit, unique=False, span=span, missing=missing):
        unreadable: list[str] = []
        for trace in traces_about(bytes(message.body), msg_id, unreadable):
            if len(found) == TRACES_MAX:
                log.warning("message %s has more traces: these are the first %d", msg_id, TRACES_MAX)
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
    """Messages of the range, queue after queue. Raises UnknownNameError for a broker or queue not there."""
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
                    start = end  # store times grow along a queue: nothing behind it is older
                    break
                if tags and message.tags not in tags:
                    continue  # the broker compares hashes
                if message.queue_offset < end and message.store_timestamp_ms >= (wanted.begin_ms or 0):
                    left -= 1
                    yield message


async def queue_bounds(
    client: ClientInstance, wanted: ReadRange
) -> AsyncIterator[tuple[MessageQueue, int, int]]:
    """Each queue of the range, where reading begins, and the offset behind its last message. Raises as
    `read`."""
    route = await client.namesrv.route(wanted.topic)
    addrs = broker_addrs(route)
    for queue in queues_of(route, wanted):
        yield queue, *await bounds(client, addrs[queue.broker_name], queue, wanted)


async def at_offset(client: ClientInstance, queue: MessageQueue, offset: int) -> MessageExt | None:
    """The message at an offset of a queue, None where there is none. Raises NoRouteError,
    UnknownNameError."""
    addrs = broker_addrs(await client.namesrv.route(queue.topic))
    if queue.broker_name not in addrs:
        raise UnknownNameError("broker", queue.broker_name, sorted(addrs))
    request = pull_request(TOOLS_CONSUMER_GROUP, queue, offset, 1)
    found = (await client.brokers.pull(addrs[queue.broker_name], queue, request)).messages
    return found[0] if found and found[0].queue_offset == offset else None


def queues_of(route: TopicRouteData, wanted: ReadRange) -> list[MessageQueue]:
    """The readable queues of a range, in order."""
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
    """Where to begin reading a queue, and the offset behind its last message.

    The reader drops what was stored before `begin_ms`: a 4.9 broker gives the message nearest to a time,
    which may be an older one, or any of several of the same millisecond.
    """
    first = await client.brokers.min_offset(addr, queue)
    end = await client.brokers.max_offset(addr, queue)
    if wanted.begin_ms:
        first = max(first, await client.brokers.offset_by_time(addr, queue, wanted.begin_ms - 1))
    if wanted.offset is not None:
        first = max(first, wanted.offset)
    return first, end
