"""What every client can ask of brokers beside its own work: stored messages, by either id, by key, by the
bounds and times of queues; and a new topic."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from itertools import chain

from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.instance import Client, ClientInstance
from cometmq.client.cluster.ranges import check_range
from cometmq.client.cluster.workers import for_each
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import MessageExt, MessageQueue
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import DLQ_PREFIX, MASTER_ID, RETRY_PREFIX, check_topic_name, is_system_topic
from cometmq.protocol.ids import IdError, OffsetId, decode_offset_id, decode_unique_key
from cometmq.protocol.properties.values import UNIQ_KEY

__all__ = [
    "ALWAYS",
    "TOPICS_AT_ONCE",
    "UNIQUE_HITS_MAX",
    "LookingClient",
    "broker_addrs",
    "by_id",
    "by_key",
    "place_in",
]

ALWAYS = (0, 2**63 - 1)  # ms
TOPICS_AT_ONCE = 16  # requests under way where all topics are asked
BROKERS_AT_ONCE = 8  # of those that are asked for a key
UNIQUE_HITS_MAX = 32  # copies of one message, as Apache's tools ask for


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
    hardly ever names a broker of this cluster. No other address is connected: ids come from anybody.
    """
    decode_unique_key(msg_id)  # raises IdError unless this may be an id of either kind
    place = place_in(msg_id)
    if place is not None and await _is_broker(client, place.host):
        return await client.brokers.view_message(place.host, place.physical_offset)
    found = await by_unique_key(client, msg_id.upper(), topic)
    if found is None:
        but = "in all topics but those of retries, dead letters and the system"
        where = but if topic is None else f"in topic {topic}"
        stranger = "" if place is None else f"; {place.host}, which it may name, is no broker of this cluster"
        raise MessageNotFound(msg_id, where + stranger)
    return found


async def _is_broker(client: ClientInstance, addr: str) -> bool:
    """Whether a broker of the cluster has this address. One that is registered by the name of its host, as in
    containers, is told by what that name means here."""
    if addr in client.routes.addresses(replicas=True):
        return True
    info = await client.namesrv.cluster_info()
    known = {each for data in info.broker_addr_table.values() for each in data.broker_addrs.values()}
    if addr in known:
        return True
    host, _, port = addr.rpartition(":")

    async def is_it(each: str) -> bool:
        named = parse_address(each)
        if named is None or str(named[1]) != port:
            return False
        try:
            found = await client.loop.getaddrinfo(*named, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return any(ip_address(place[0]) == ip_address(host.strip("[]")) for *_, place in found)

    return any(await for_each(known, is_it, TOPICS_AT_ONCE))


def place_in(msg_id: str) -> OffsetId | None:
    """Broker and position, None for an id that can be no offset id."""
    try:
        place = decode_offset_id(msg_id)
    except IdError:
        return None
    return place if int(place.host.rpartition(":")[2]) in range(1, 65_536) else None


async def by_unique_key(client: ClientInstance, msg_id: str, topic: str | None) -> MessageExt | None:
    """The oldest message with a unique key, of one topic or of the first that has any; what lies in retry,
    dead-letter and system topics is found only if its topic is given. Raises what a broker says that may have
    it, if no other has."""
    topics = [topic] if topic is not None else client.namespace.own(await client.namesrv.topics())
    hidden = (RETRY_PREFIX, DLQ_PREFIX)
    wanted = [name for name in topics if topic or not (is_system_topic(name) or name.startswith(hidden))]
    missing: dict[str, CometError] = {}
    for at in range(0, len(wanted), TOPICS_AT_ONCE):
        some = wanted[at : at + TOPICS_AT_ONCE]
        asked = (by_key(client, name, msg_id, UNIQUE_HITS_MAX, unique=True, missing=missing) for name in some)
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, NoRouteError) and topic is None:
                continue  # its brokers are away, or it is deleted just now
            if isinstance(found, BaseException):
                if not (missing and isinstance(found, CometError)):
                    raise found
            elif found:
                return found[0]
    if missing:
        raise next(iter(missing.values()))
    return None


async def by_key(
    client: ClientInstance,
    topic: str,
    key: str,
    limit: int,
    *,
    unique: bool,
    span: tuple[int, int] = ALWAYS,
    missing: dict[str, CometError] | None = None,
) -> list[MessageExt]:
    """Hits of all brokers of a topic, oldest first, those of other keys with the same hash taken out.

    missing: where it is given, brokers that fail are put in, by name, with why, and the hits of the others
    are given; raises if none answers. Without it the first one that fails is raised.
    """
    failed: dict[str, CometError] = {}

    async def ask(place: tuple[str, str]) -> list[MessageExt]:
        try:
            return await client.brokers.query_message(
                place[1],
                topic,
                key,
                max_count=limit,
                begin_ms=span[0],
                end_ms=span[1],
                unique_key=unique,
                broker_name=place[0],
            )
        except CometError as error:
            failed[place[0]] = error
            return []

    addrs = broker_addrs(await client.namesrv.route(topic))
    answers = await for_each(addrs.items(), ask, BROKERS_AT_ONCE)
    if missing is not None:
        missing |= failed
    if failed and (missing is None or len(failed) == len(addrs)):
        raise next(iter(failed.values()))
    found: list[MessageExt] = []
    for message in chain.from_iterable(answers):
        keys = (message.properties.get(UNIQ_KEY),) if unique else message.keys
        if key in keys and message.topic == topic:
            found.append(message)
    found.sort(key=lambda message: (message.store_timestamp_ms, message.queue_id, message.queue_offset))
    return found[:limit]


class LookingClient(Client):
    """A client that finds messages by id and key, and the bounds of queues, and can make a topic."""

    def _running(self) -> ClientInstance:
        if self._state != "stopping":  # what was begun before may end
            self._check_running()
        return self.client

    async def _read(self, queue: MessageQueue, ask: Callable[[BrokerApi, str], Awaitable[int]]) -> int:
        """Ask the master of a queue's broker, or a replica of it while the master cannot be reached."""
        client = self._running()
        return await client.reads.run(queue, lambda target: ask(client.brokers, target.addr))

    async def view_message(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """The message of an id: an offset id, as brokers give, or the unique key of its producer, which is
        looked for in `topic`, or else in all topics. Raises MessageNotFound, BrokerError, IdError."""
        return await by_id(self._running(), msg_id, topic)

    async def query_messages(
        self, topic: str, key: str, *, max_count: int = 64, begin_ms: int = 0, end_ms: int = ALWAYS[1]
    ) -> list[MessageExt]:
        """Messages that have a key, stored between two times (ms), the oldest first. Raises NoRouteError."""
        return await by_key(self._running(), topic, key, max_count, unique=False, span=(begin_ms, end_ms))

    async def min_offset(self, queue: MessageQueue) -> int:
        """First offset that is still stored."""
        return await self._read(queue, lambda brokers, addr: brokers.min_offset(addr, queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._read(queue, lambda brokers, addr: brokers.max_offset(addr, queue))

    async def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Offset by store time in ms: in 4.9 the nearest message, in 5.x the first one not older."""
        return await self._read(
            queue, lambda brokers, addr: brokers.offset_by_time(addr, queue, timestamp_ms)
        )

    async def earliest_store_time(self, queue: MessageQueue) -> int:
        """Store time in ms of a queue's first message, -1 without one."""
        return await self._read(queue, lambda brokers, addr: brokers.earliest_store_time(addr, queue))

    async def create_topic(self, key: str, topic: str, queue_nums: int = 4) -> None:
        """Create or change a topic, with so many queues to read and to write, at every master of the topic
        `key`: TBW102 where brokers make topics by themselves, else one that lies where the new one shall.

        All are asked; then what the first one said that did not make it is raised. Raises MessageIllegal,
        NoRouteError, BrokerError; `Admin.create_topic` has all settings.
        """
        client = self._running()
        check_topic_name(topic)
        check_range("queue_nums", queue_nums, 1)
        route = await client.namesrv.route(key)
        masters = [addr for data in route.broker_datas if (addr := data.broker_addrs.get(MASTER_ID))]
        if not masters:
            raise NoRouteError(key, [(client.namesrv.current, "a route without a master")])
        made = (
            client.brokers.create_topic(addr, topic, read_queue_nums=queue_nums, write_queue_nums=queue_nums)
            for addr in sorted(masters)
        )
        outcomes = await asyncio.gather(*made, return_exceptions=True)
        client.routes.remove(topic)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
