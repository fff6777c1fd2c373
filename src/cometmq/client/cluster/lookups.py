"""Requests that every client can send: messages by id or key, offsets of queues, topic creation."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from itertools import chain

from cometmq.client.cluster.broker_api import BrokerApi
from cometmq.client.cluster.instance import ClientInstance
from cometmq.client.cluster.life_cycle import LifeCycle
from cometmq.client.cluster.options import ClientOptions, check_range
from cometmq.client.cluster.workers import all_of, for_each
from cometmq.errors import CometError, MessageNotFound, NoRouteError
from cometmq.message import MessageExt, MessageQueue, check_group_name, check_topic_name
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import DLQ_PREFIX, MASTER_ID, RETRY_PREFIX, is_system_topic
from cometmq.protocol.ids import IdError, OffsetId, decode_offset_id, id_bytes, is_id_of_5x
from cometmq.protocol.properties.values import UNIQ_KEY

ALWAYS = (0, 2**63 - 1)  # a range, in ms, that contains all store times
TOPICS_AT_ONCE = 16  # maximum number of concurrent requests in a search of all topics
MAX_CONCURRENT_BROKERS = 8  # maximum number of brokers searched for a key at the same time
MAX_UNIQUE_HITS = 32  # messages per search for a unique key, as in Apache's tools


def broker_addrs(route: TopicRouteData) -> dict[str, str]:
    """Return one address per broker name: of the master or else of the replica with the lowest id."""
    return {
        data.broker_name: data.broker_addrs[min(data.broker_addrs)]
        for data in sorted(route.broker_datas, key=lambda data: data.broker_name)
        if data.broker_addrs
    }


async def by_id(client: ClientInstance, msg_id: str, topic: str | None) -> MessageExt:
    """Return the message with an offset id or a unique key. Raises IdError for text that is neither.

    Both kinds are hexadecimal text of the same length, apart from the unique keys of 5.x's gRPC clients. The
    address in the text distinguishes them: a unique key that is read as an offset id hardly ever contains the
    address of a broker of this cluster. The client connects only to brokers of this cluster, because ids may
    come from untrusted sources.
    """
    if not is_id_of_5x(msg_id):
        id_bytes(msg_id)  # raises IdError for text that is neither an offset id nor a unique key
    place = offset_id_in(msg_id)
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
    """Return whether a broker of the cluster has this address, or a host name that resolves to it."""
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


def offset_id_in(msg_id: str) -> OffsetId | None:
    """Return the broker address and position in an offset id, or None if `msg_id` is not an offset id."""
    try:
        place = decode_offset_id(msg_id)
    except IdError:
        return None
    return place if int(place.host.rpartition(":")[2]) in range(1, 65_536) else None


async def by_unique_key(client: ClientInstance, msg_id: str, topic: str | None) -> MessageExt | None:
    """Return the oldest message with a unique key, None if there is none.

    Without a topic the search ends at the first topic that has the message. The search omits retry,
    dead-letter and system topics. If the message is not found and a broker did not answer, that broker's
    error is raised.
    """
    topics = [topic] if topic is not None else client.namespace.own(await client.namesrv.topics())
    hidden = (RETRY_PREFIX, DLQ_PREFIX)
    wanted = [name for name in topics if topic or not (is_system_topic(name) or name.startswith(hidden))]
    missing: dict[str, CometError] = {}
    for at in range(0, len(wanted), TOPICS_AT_ONCE):
        some = wanted[at : at + TOPICS_AT_ONCE]
        asked = (by_key(client, name, msg_id, MAX_UNIQUE_HITS, unique=True, missing=missing) for name in some)
        for found in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(found, NoRouteError) and topic is None:
                continue  # the topic was just deleted, or none of its brokers is left
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
    """Return the messages of a topic that have a key, oldest first.

    Brokers search by the hash of a key, so messages with other keys are removed from their answers. `missing`
    receives the errors of brokers by name: an error is then raised only if all brokers fail. None: the first
    error is raised.
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
    answers = await for_each(addrs.items(), ask, MAX_CONCURRENT_BROKERS)
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


class Client(LifeCycle):
    """A client that uses a given client instance, or creates its own for `namesrv`."""

    def __init__(
        self,
        name: str,
        namesrv: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        super().__init__(name)
        self._namesrv = namesrv
        self._client_options = client_options
        self._client = client
        self._shared = client is not None
        options = client.options if client is not None else client_options
        self.telemetry = options.telemetry if options is not None else None
        """OpenTelemetry spans, if the client options request them."""

    @property
    def client(self) -> ClientInstance:
        """The client instance: connections, routes and heartbeats. Raises ClientStateError before start."""
        if self._client is None:
            raise self._not_running()
        return self._client

    async def _start_client(self) -> ClientInstance:
        if self._client is None:
            self._client = ClientInstance(self._namesrv, self._client_options)
        await self._client.start()
        return self._client

    async def _close_client(self) -> None:
        if self._client is not None and not self._shared:
            await self._client.close()


class QueryClient(Client):
    """The base class of producers and consumers: queries of messages and offsets, and topic creation."""

    def __init__(
        self,
        kind: str,
        group: str,
        namesrv: str | Sequence[str] | None,
        client: ClientInstance | None,
        client_options: ClientOptions | None,
    ) -> None:
        check_group_name(group)
        super().__init__(f"{kind} of group {group}", namesrv, client, client_options)
        self.group = group

    def _running(self) -> ClientInstance:
        # Calls that began before the stop may still send requests.
        if self._state != "stopping":
            self._check_running()
        return self.client

    async def _read(self, queue: MessageQueue, ask: Callable[[BrokerApi, str], Awaitable[int]]) -> int:
        """Send a request to the master of a queue, or to a replica while the master is unreachable."""
        client = self._running()
        return await client.reads.run(queue, lambda target: ask(client.brokers, target.addr))

    async def view_message(self, msg_id: str, topic: str | None = None) -> MessageExt:
        """Return the message with an id.

        Args:
            msg_id: An offset id, which brokers assign, or the unique key that the producer assigned.
            topic: The topic in which a unique key is searched. None: all topics except retry, dead-letter and
                system topics.

        Raises:
            IdError: The text is no message id.
            MessageNotFound: No such message is stored.
            BrokerError: A broker refused the request.
        """
        return await by_id(self._running(), msg_id, topic)

    async def query_messages(
        self, topic: str, key: str, *, max_count: int = 64, begin_ms: int = 0, end_ms: int = ALWAYS[1]
    ) -> list[MessageExt]:
        """Return the messages of a topic that have a key and were stored within a time range.

        Args:
            topic: The topic.
            key: The key.
            max_count: The maximum number of messages.
            begin_ms: The begin of the range in milliseconds since 1970.
            end_ms: The end of the range in milliseconds since 1970.

        Returns:
            The messages, oldest first.

        Raises:
            NoRouteError: The topic has no route.
            CometError: A broker cannot be reached or refused the request.
        """
        return await by_key(self._running(), topic, key, max_count, unique=False, span=(begin_ms, end_ms))

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the minimum offset of a queue: the offset of its oldest message that is still stored.

        Raises:
            CometError: The broker cannot be reached or refused the request.
        """
        return await self._read(queue, lambda brokers, addr: brokers.min_offset(addr, queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the next message of a queue will get.

        Raises:
            CometError: The broker cannot be reached or refused the request.
        """
        return await self._read(queue, lambda brokers, addr: brokers.max_offset(addr, queue))

    async def offset_by_time(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of a queue at a store time.

        Args:
            queue: The queue.
            timestamp_ms: The store time in milliseconds since 1970.

        Returns:
            RocketMQ 4.9: the offset of the nearest message. 5.x: of the first message that is not older.

        Raises:
            CometError: The broker cannot be reached or refused the request.
        """
        return await self._read(
            queue, lambda brokers, addr: brokers.offset_by_time(addr, queue, timestamp_ms)
        )

    async def earliest_store_time(self, queue: MessageQueue) -> int:
        """Return the store time of the first message of a queue.

        Returns:
            Milliseconds since 1970, -1 for an empty queue.

        Raises:
            CometError: The broker cannot be reached or refused the request.
        """
        return await self._read(queue, lambda brokers, addr: brokers.earliest_store_time(addr, queue))

    async def create_topic(self, key: str, topic: str, queue_nums: int = 4) -> None:
        """Create or change a topic at every master of another topic.

        `Admin.create_topic` offers all settings.

        Args:
            key: The topic whose masters create the new topic: TBW102 for brokers that create topics
                automatically, otherwise an existing topic.
            topic: The topic to create.
            queue_nums: The number of read queues and of write queues at each master, 1 or more.

        Raises:
            MessageIllegal: The name of the topic is illegal.
            NoRouteError: The topic `key` has no route with a master.
            BrokerError: A broker refused. The request is sent to all brokers, then the first error is raised.
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
        try:
            await all_of(*made)
        finally:
            client.routes.remove(topic)
