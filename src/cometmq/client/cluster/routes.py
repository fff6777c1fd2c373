"""The routes of topics for producers and consumers, and the addresses of brokers."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import MASTER_ID, Perm
from cometmq.text import printable


class TopicRoute(msgspec.Struct, frozen=True):
    """The route of a topic with its readable and writable queues."""

    topic: str
    data: TopicRouteData
    write_queues: tuple[MessageQueue, ...]
    """The writable queues of brokers with a master: sorted, or in the topic's configured order."""
    read_queues: tuple[MessageQueue, ...]
    unusable: tuple[str, ...] = ()
    """Invalid broker addresses in the name server's answer. They were removed from `data`."""
    from_template: bool = False
    """Whether the topic does not exist yet and this route was made from the route of the template topic."""

    def one_of_each_broker(self) -> list[MessageQueue]:
        """Return one readable queue of each broker."""
        return list({queue.broker_name: queue for queue in self.read_queues}.values())


class ReadTarget(NamedTuple):
    """A broker from which a queue may be read: its master or a replica."""

    addr: str
    is_replica: bool


MAX_QUEUES = 262_144
"""Maximum number of queues in a route (about 40 MB of memory): four times the maximum of one broker."""
MAX_ADDRESSES = 10_000
"""Maximum number of addresses in one route, because each address gets a connection and heartbeats."""
MAX_IDLE_ROUTES = 256
"""Maximum number of kept routes of unused topics, for programs that send rarely or to ever new topics."""


def topic_route(topic: str, data: TopicRouteData) -> TopicRoute:
    """Return the route in an answer without invalid addresses. Raises BodyError if it is too large."""
    _check_counts(topic, data)
    unusable = sorted(
        {
            addr
            for broker in data.broker_datas
            for addr in broker.broker_addrs.values()
            if parse_address(addr) is None
        }
    )
    if unusable:
        data = _without(data, unusable)
    with_master = {broker.broker_name for broker in data.broker_datas if MASTER_ID in broker.broker_addrs}
    queue_datas = sorted(data.queue_datas, key=lambda queue_data: queue_data.broker_name)
    write = [
        MessageQueue(topic, queue_data.broker_name, queue_id)
        for queue_data in queue_datas
        if queue_data.perm & Perm.WRITE and queue_data.broker_name in with_master
        for queue_id in range(queue_data.write_queue_nums)
    ]
    read = [
        MessageQueue(topic, queue_data.broker_name, queue_id)
        for queue_data in queue_datas
        if queue_data.perm & Perm.READ
        for queue_id in range(queue_data.read_queue_nums)
    ]
    if data.order_topic_conf:
        write = [
            MessageQueue(topic, broker_name, queue_id)
            for broker_name, count in _ordered(data.order_topic_conf)
            for queue_id in range(count)
        ]
    return TopicRoute(topic, data, tuple(write), tuple(read), tuple(unusable))


def _ordered(order_topic_conf: str) -> list[tuple[str, int]]:
    """Parse an order configuration, `broker-a:4;broker-b:2`, into broker names and numbers of queues."""
    parts = [part.partition(":") for part in order_topic_conf.split(";")]
    return [
        (broker_name.strip(), int(count[:10]))  # a longer number exceeds MAX_QUEUES anyway
        for broker_name, _, text in parts
        if (count := text.strip()).isascii() and count.isdecimal()
    ]


def _check_counts(topic: str, data: TopicRouteData) -> None:
    counts = {
        "readQueueNums": sum(max(0, each.read_queue_nums) for each in data.queue_datas),
        "writeQueueNums": sum(max(0, each.write_queue_nums) for each in data.queue_datas),
        "orderTopicConf": sum(count for _, count in _ordered(data.order_topic_conf or "")),
    }
    for field, count in counts.items():
        if count > MAX_QUEUES:
            problem = f"topic {printable(topic)} has {count} queues, a client accepts {MAX_QUEUES} at most"
            raise BodyError("TopicRouteData", problem, field)
    addresses = sum(len(broker.broker_addrs) for broker in data.broker_datas)
    if addresses > MAX_ADDRESSES:
        problem = (
            f"topic {printable(topic)} has {addresses} addresses, a client accepts {MAX_ADDRESSES} at most"
        )
        raise BodyError("TopicRouteData", problem, "brokerDatas")


def _without(data: TopicRouteData, addrs: Collection[str]) -> TopicRouteData:
    brokers = [
        msgspec.structs.replace(
            broker,
            broker_addrs={number: addr for number, addr in broker.broker_addrs.items() if addr not in addrs},
        )
        for broker in data.broker_datas
    ]
    return msgspec.structs.replace(data, broker_datas=brokers)


def template_route(topic: str, template: TopicRouteData, queue_nums: int) -> TopicRoute:
    """Return the route for a topic's first message, with the queues that the brokers will create."""
    route = topic_route(topic, template)
    kept = tuple(queue for queue in route.write_queues if queue.queue_id < queue_nums)
    return TopicRoute(topic, route.data, kept, (), route.unusable, from_template=True)


class RouteTable:
    """The known routes by topic, and the addresses of brokers by broker name."""

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}
        self._addrs: dict[str, dict[int, str]] = {}
        self._used: set[str] = set()
        """The topics whose route was read since the last `forget_unused`."""
        self.unreachable: set[str] = set()
        """Addresses of brokers that reads could not reach. Further reads try these brokers last."""

    def __contains__(self, topic: str) -> bool:
        return topic in self._routes

    def get(self, topic: str) -> TopicRoute | None:
        """Return the route of a topic and mark the route as used."""
        self._used.add(topic)
        return self._routes.get(topic)

    def use(self, topic: str) -> None:
        """Mark a topic's route as used, so that the next `forget_unused` keeps it."""
        self._used.add(topic)

    def forget_unused(self, kept: Collection[str]) -> list[str]:
        """Drop the routes that were not used since the last call, but those in `kept`. Return their topics.

        The newest `MAX_IDLE_ROUTES` unused routes stay.
        """
        unused = [topic for topic in self._routes if topic not in self._used and topic not in kept]
        self._used.clear()
        dropped = unused[:-MAX_IDLE_ROUTES]
        for topic in dropped:
            del self._routes[topic]
        self.forget_unrouted()
        return dropped

    def put(self, route: TopicRoute) -> bool:
        """Store a route and the addresses of its brokers. Return whether it is new or has changed."""
        before = self._routes.get(route.topic)
        self._routes[route.topic] = route
        for broker in route.data.broker_datas:
            self._addrs[broker.broker_name] = dict(broker.broker_addrs)
        return before is None or before.data != route.data or before.from_template != route.from_template

    def remove(self, topic: str) -> None:
        self._routes.pop(topic, None)

    def forget_unrouted(self) -> None:
        """Drop the addresses of brokers that no route contains any more."""
        named = {broker.broker_name for route in self._routes.values() for broker in route.data.broker_datas}
        for broker_name in set(self._addrs) - named:
            del self._addrs[broker_name]

    @property
    def topics(self) -> list[str]:
        return list(self._routes)

    def master(self, broker_name: str) -> str | None:
        addrs = self._addrs.get(broker_name)
        return None if addrs is None else addrs.get(MASTER_ID)

    def any(self, broker_name: str) -> str | None:
        """Return the address of the broker's master, otherwise of the replica with the lowest broker id."""
        addrs = self._addrs.get(broker_name)
        return addrs[min(addrs)] if addrs else None

    def all_of(self, broker_name: str) -> list[str]:
        """Return the address of the broker's master, then the addresses of its replicas by broker id."""
        addrs = self._addrs.get(broker_name, {})
        return [addrs[broker_id] for broker_id in sorted(addrs)]

    def read_targets(self, broker_name: str, broker_id: int = MASTER_ID) -> list[ReadTarget]:
        """Return the brokers that may serve a read, in the order in which to try them.

        The first is the broker with the id `broker_id` or, if this id is unknown, `broker_id + 1`, as in
        RocketMQ's clients. The master and the replicas follow by broker id. Brokers with an address in
        `unreachable` come last.
        """
        addrs = self._addrs.get(broker_name, {})
        first = next((number for number in (broker_id, broker_id + 1) if number in addrs), MASTER_ID)
        order = sorted(addrs, key=lambda number: (addrs[number] in self.unreachable, number != first, number))
        return [ReadTarget(addrs[number], number != MASTER_ID) for number in order]

    def addresses(self, *, replicas: bool) -> set[str]:
        """Return the addresses of all masters, and if `replicas` is set also those of all replicas."""
        return {
            addr
            for addrs in self._addrs.values()
            for broker_id, addr in addrs.items()
            if replicas or broker_id == MASTER_ID
        }

    def filter_servers(self, topic: str, broker_addr: str) -> list[str]:
        """Return the addresses of a broker's filter servers, as the route of `topic` lists them."""
        route = self._routes.get(topic)
        return route.data.filter_server_table.get(broker_addr, []) if route is not None else []

    def readers_of(self, topic: str) -> list[str]:
        """Return the addresses of a topic's brokers: reachable brokers first, and masters before replicas."""
        route = self._routes.get(topic)
        names = [broker.broker_name for broker in route.data.broker_datas] if route is not None else []
        found = [target for name in sorted(names) for target in self.read_targets(name)]
        found.sort(key=lambda target: (target.addr in self.unreachable, target.is_replica))
        return [target.addr for target in found]
