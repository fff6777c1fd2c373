"""Finding and reading stored messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from cometmq import logs
from cometmq.admin.errors import MessageNotFound, UnknownNameError
from cometmq.admin.values import TraceView
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.namesrv_api import NameServersUnreachable
from cometmq.client.cluster.requests import pull_request
from cometmq.errors import CometError, NoRouteError
from cometmq.message import MessageExt, MessageQueue, PullStatus
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    TOOLS_CONSUMER_GROUP,
    TRANS_CHECK_MAX_TIME_TOPIC,
    Perm,
    RequestCode,
    is_system_topic,
)
from cometmq.protocol.headers import ResumeCheckHalfMessageRequestHeader
from cometmq.protocol.ids import IdError, OffsetId, decode_offset_id, decode_unique_key
from cometmq.protocol.properties.values import UNIQ_KEY
from cometmq.protocol.traces import traces_about
from cometmq.text import counted

log = logs.logger(__name__)

PULL_BATCH = 32
ALWAYS = (0, 2**63 - 1)  # ms
TOPICS_AT_ONCE = 16  # requests under way where all topics are asked
UNIQUE_HITS_MAX = 32  # copies of one message, as Apache's tools ask for
TRACES_MAX = 10_000  # records about one message


class ReadRange(msgspec.Struct, frozen=True, kw_only=True):
    """A topic, or one broker's or one queue's part of it; times in ms, `count` messages at most."""

    topic: str
    broker_name: str | None = None
    queue_id: int | None = None
    offset: int | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    count: int = 128


def broker_addrs(route: TopicRouteData) -> dict[str, str]:
    """Broker name -> the address to ask: its master's, else that of its slave with the lowest id."""
    return {
        data.broker_name: data.broker_addrs[min(data.broker_addrs)]
        for data in sorted(route.broker_datas, key=lambda data: data.broker_name)
        if data.broker_addrs
    }


async def by_id(client: ClientInstance, msg_id: str, topic: str | None) -> MessageExt:
    """The message of an id of either kind. Raises IdError for text that is neither.

    Both kinds are hex of the same length. The address decides: a unique key that is read as an offset id
    hardly ever names a port, or a broker of this cluster.
    """
    decode_unique_key(msg_id)  # raises IdError unless this may be an id of either kind
    problem: CometError | None = None
    if (place := place_in(msg_id)) is not None:
        try:
            return await client.brokers.view_message(place.host, place.physical_offset)
        except CometError as error:
            problem = error
        info = await client.namesrv.cluster_info()
        if any(place.host in data.broker_addrs.values() for data in info.broker_addr_table.values()):
            raise problem
    found = await by_unique_key(client, msg_id.upper(), topic)
    if found is None:
        but = "in all topics but those of retries, dead letters and the system"
        where = but if topic is None else f"in topic {topic}"
        raise problem or MessageNotFound(msg_id, where)
    return found


def place_in(msg_id: str) -> OffsetId | None:
    """Broker and position, None for an id that can be no offset id."""
    try:
        place = decode_offset_id(msg_id)
    except IdError:
        return None
    return place if int(place.host.rpartition(":")[2]) in range(1, 65_536) else None


async def by_unique_key(client: ClientInstance, msg_id: str, topic: str | None) -> MessageExt | None:
    """The oldest message with a unique key, of one topic or of the first that has any; what lies in retry,
    dead-letter and system topics is found only if its topic is given."""
    topics = [topic] if topic is not None else await client.namesrv.topics()
    hidden = (RETRY_PREFIX, DLQ_PREFIX)
    wanted = [name for name in topics if topic or not (is_system_topic(name) or name.startswith(hidden))]
    for at in range(0, len(wanted), TOPICS_AT_ONCE):
        some = wanted[at : at + TOPICS_AT_ONCE]
        asked = (by_key(client, name, msg_id, UNIQUE_HITS_MAX, unique=True) for name in some)
        for found in await asyncio.gather(*asked):
            if found:
                return found[0]
    return None


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


async def by_key(
    client: ClientInstance, topic: str, key: str, limit: int, *, unique: bool, span: tuple[int, int] = ALWAYS
) -> list[MessageExt]:
    """Hits of all brokers of a topic, oldest first, those of other keys with the same hash taken out."""
    found: list[MessageExt] = []
    for name, addr in broker_addrs(await client.namesrv.route(topic)).items():
        hits = await client.brokers.query_message(
            addr,
            topic,
            key,
            max_count=limit,
            begin_ms=span[0],
            end_ms=span[1],
            unique_key=unique,
            broker_name=name,
        )
        for message in hits:
            keys = (message.properties.get(UNIQ_KEY),) if unique else message.keys
            if key in keys and message.topic == topic:
                found.append(message)
    found.sort(key=lambda message: (message.store_timestamp_ms, message.queue_id, message.queue_offset))
    return found[:limit]


async def traces(
    client: ClientInstance, topic: str, msg_id: str, limit: int, span: tuple[int, int]
) -> list[TraceView]:
    """The traces of a message in the trace messages that have its id as a key, the oldest first. The ids of a
    batch, joined by commas, are one id to Java's clients; if nobody has it, those of each of its messages."""
    found: list[TraceView] = []
    for message in await by_key(client, topic, msg_id, limit, unique=False, span=span):
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
            found += await traces(client, topic, each.strip(), limit, span)
    return found


async def read(
    client: ClientInstance, wanted: ReadRange, group: str | None = None
) -> AsyncIterator[MessageExt]:
    """Messages of the range, queue after queue. Raises UnknownNameError for a broker or queue not there."""
    route = await client.namesrv.route(wanted.topic)
    addrs = broker_addrs(route)
    left = wanted.count
    for queue in queues_of(route, wanted):
        addr = addrs[queue.broker_name]
        start, end = await bounds(client, addr, queue, wanted)
        while start < end and left > 0:
            request = pull_request(
                group or TOOLS_CONSUMER_GROUP, queue, start, min(PULL_BATCH, left, end - start)
            )
            result = await client.brokers.pull(addr, queue, request)
            if result.status is PullStatus.NO_NEW_MSG or result.next_begin_offset <= start:
                break
            start = result.next_begin_offset
            for message in result.messages:
                if wanted.end_ms is not None and message.store_timestamp_ms >= wanted.end_ms:
                    start = end  # store times grow along a queue: nothing behind it is older
                    break
                if message.queue_offset < end and message.store_timestamp_ms >= (wanted.begin_ms or 0):
                    left -= 1
                    yield message


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
