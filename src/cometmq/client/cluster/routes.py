"""What name servers say about a topic, as producers and consumers need it, and where each broker is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from cometmq.errors import BodyError
from cometmq.message import MessageQueue
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import MASTER_ID, Perm
from cometmq.text import printable

__all__ = ["ReadTarget", "RouteTable", "TopicRoute", "template_route", "topic_route"]


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """What a route means for clients: the queues that can be written and read."""

    topic: str
    data: TopicRouteData
    write_queues: tuple[MessageQueue, ...]
    """On brokers that have a master and let the topic be written, by broker name and queue id; or in the
    order of the topic's order configuration."""
    read_queues: tuple[MessageQueue, ...]
    unusable: tuple[str, ...] = ()
    """What the name server gave as addresses and is left out of `data`, because it cannot be any."""
    from_template: bool = False
    """Made from the template's route: the topic does not exist yet and its first message will create it."""

    def one_of_each_broker(self) -> list[MessageQueue]:
        """Return one readable queue of each broker."""
        return list({queue.broker_name: queue for queue in self.read_queues}.values())


class ReadTarget(NamedTuple):
    """A broker that may serve a read."""

    addr: str
    is_replica: bool


QUEUES_MAX = 262_144
"""Queues of a topic, over all brokers, that a client makes objects of (some 40 MB): four brokers with as many
as a name server lets them register."""
ADDRESSES_MAX = 10_000
"""Addresses in one route: a heartbeat goes to each, and a connection is made for it."""
IDLE_MAX = 256
"""Routes of topics that nobody uses any more, which are refreshed all the same: a program that sends seldom
stays known to its brokers, and one that makes up topics is bounded."""


def topic_route(topic: str, data: TopicRouteData) -> TopicRoute:
    """What a name server's answer means, addresses that cannot be any left out.

    Raises BodyError for a route with more queues or addresses than a client can work with.
    """
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
    """`broker-a:4;broker-b:2`: these queues in this order, whatever brokers are up."""
    parts = [part.partition(":") for part in order_topic_conf.split(";")]
    return [
        (broker_name.strip(), int(count[:10]))  # longer ones are beyond every limit as well
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
        if count > QUEUES_MAX:
            problem = f"topic {printable(topic)} has {count} queues, a client takes {QUEUES_MAX} at most"
            raise BodyError("TopicRouteData", problem, field)
    addresses = sum(len(broker.broker_addrs) for broker in data.broker_datas)
    if addresses > ADDRESSES_MAX:
        problem = (
            f"topic {printable(topic)} has {addresses} addresses, a client takes {ADDRESSES_MAX} at most"
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
    """Where the first message of a topic may go: the queues that brokers would make for it."""
    route = topic_route(topic, template)
    kept = tuple(queue for queue in route.write_queues if queue.queue_id < queue_nums)
    return TopicRoute(topic, route.data, kept, (), route.unusable, from_template=True)


class RouteTable:
    """Routes by topic, and from them the addresses of brokers by name."""

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}
        self._addrs: dict[str, dict[int, str]] = {}
        self._used: set[str] = set()
        """Topics whose route was asked for since the last `forget_unused`."""
        self.unreachable: set[str] = set()
        """Addresses that the owner of this table could not reach; reads go to them last."""

    def get(self, topic: str) -> TopicRoute | None:
        """To work with it: it counts as used."""
        self._used.add(topic)
        return self._routes.get(topic)

    def use(self, topic: str) -> None:
        """Count a route as used whose brokers' addresses are worked with."""
        self._used.add(topic)

    def forget_unused(self, kept: Collection[str]) -> list[str]:
        """Drop the routes that nobody has used since the last call, but the `IDLE_MAX` newest of them and
        those of `kept`; the topics that were dropped."""
        unused = [topic for topic in self._routes if topic not in self._used and topic not in kept]
        self._used.clear()
        dropped = unused[:-IDLE_MAX]
        for topic in dropped:
            del self._routes[topic]
        self.forget_unrouted()
        return dropped

    def put(self, route: TopicRoute) -> bool:
        """Whether it says anything new. A broker's addresses are those of the newest route that names it."""
        before = self._routes.get(route.topic)
        self._routes[route.topic] = route
        for broker in route.data.broker_datas:
            self._addrs[broker.broker_name] = dict(broker.broker_addrs)
        return before is None or before.data != route.data or before.from_template != route.from_template

    def remove(self, topic: str) -> None:
        self._routes.pop(topic, None)

    def forget_unrouted(self) -> None:
        """Drop the addresses of brokers that no route names any more."""
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
        """The master, else the replica with the lowest id."""
        addrs = self._addrs.get(broker_name)
        return addrs[min(addrs)] if addrs else None

    def all_of(self, broker_name: str) -> list[str]:
        """The master, then the replicas by id."""
        addrs = self._addrs.get(broker_name, {})
        return [addrs[broker_id] for broker_id in sorted(addrs)]

    def read_targets(self, broker_name: str, broker_id: int = MASTER_ID) -> list[ReadTarget]:
        """Return the brokers that may serve a read, in the order in which they are tried.

        First comes the broker id that was suggested, else the one after it, as RocketMQ's clients have it;
        then the master and the replicas by id. Addresses in `unreachable` come last.
        """
        addrs = self._addrs.get(broker_name, {})
        first = next((number for number in (broker_id, broker_id + 1) if number in addrs), MASTER_ID)
        order = sorted(addrs, key=lambda number: (addrs[number] in self.unreachable, number != first, number))
        return [ReadTarget(addrs[number], number != MASTER_ID) for number in order]

    def addresses(self, *, replicas: bool) -> set[str]:
        """Of all masters, and with `replicas` of all the others."""
        return {
            addr
            for addrs in self._addrs.values()
            for broker_id, addr in addrs.items()
            if replicas or broker_id == MASTER_ID
        }

    def filter_servers(self, topic: str, broker_addr: str) -> list[str]:
        """Those of a broker, as the topic's route names them."""
        route = self._routes.get(topic)
        return route.data.filter_server_table.get(broker_addr, []) if route is not None else []

    def readers_of(self, topic: str) -> list[str]:
        """Return the address of each broker of a topic: the masters first, then the replicas."""
        route = self._routes.get(topic)
        names = [broker.broker_name for broker in route.data.broker_datas] if route is not None else []
        found = [target for name in sorted(names) for target in self.read_targets(name)]
        found.sort(key=lambda target: (target.addr in self.unreachable, target.is_replica))
        return [target.addr for target in found]
