"""What name servers say about a topic, as producers and consumers need it, and where each broker is."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.message import MessageQueue
from cometmq.protocol.bodies import TopicRouteData
from cometmq.protocol.codes import MASTER_ID, Perm

__all__ = ["RouteTable", "TopicRoute", "template_route", "topic_route"]


@dataclass(frozen=True, slots=True)
class TopicRoute:
    topic: str
    data: TopicRouteData
    write_queues: tuple[MessageQueue, ...]
    """On brokers that have a master and let the topic be written, by broker name and queue id; or in the
    order of the topic's order configuration."""
    read_queues: tuple[MessageQueue, ...]
    from_template: bool = False
    """Made from the template's route: the topic does not exist yet and its first message will create it."""


def topic_route(topic: str, data: TopicRouteData) -> TopicRoute:
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
        write = _ordered_queues(topic, data.order_topic_conf)
    return TopicRoute(topic, data, tuple(write), tuple(read))


def _ordered_queues(topic: str, order_topic_conf: str) -> list[MessageQueue]:
    """`broker-a:4;broker-b:2`: these queues in this order, whatever brokers are up."""
    queues: list[MessageQueue] = []
    for part in order_topic_conf.split(";"):
        broker_name, _, count = part.partition(":")
        if count.strip().isdigit():
            queues += [MessageQueue(topic, broker_name.strip(), queue_id) for queue_id in range(int(count))]
    return queues


def template_route(topic: str, template: TopicRouteData, queue_nums: int) -> TopicRoute:
    """Where the first message of a topic may go: the brokers that create topics, with the queues they would
    give it."""
    route = topic_route(topic, template)
    kept = tuple(queue for queue in route.write_queues if queue.queue_id < queue_nums)
    return TopicRoute(topic, template, kept, (), from_template=True)


class RouteTable:
    """Routes by topic, and from them the addresses of brokers by name."""

    def __init__(self) -> None:
        self._routes: dict[str, TopicRoute] = {}
        self._addrs: dict[str, dict[int, str]] = {}

    def get(self, topic: str) -> TopicRoute | None:
        return self._routes.get(topic)

    def put(self, route: TopicRoute) -> bool:
        """Whether it says anything new. A broker's addresses are those of the newest route that names it."""
        before = self._routes.get(route.topic)
        self._routes[route.topic] = route
        for broker in route.data.broker_datas:
            self._addrs[broker.broker_name] = dict(broker.broker_addrs)
        return before is None or before.data != route.data or before.from_template != route.from_template

    def remove(self, topic: str) -> None:
        self._routes.pop(topic, None)

    def forget_unrouted(self) -> set[str]:
        """Drop the addresses of brokers that no route names any more; returns their names."""
        named = {broker.broker_name for route in self._routes.values() for broker in route.data.broker_datas}
        gone = set(self._addrs) - named
        for broker_name in gone:
            del self._addrs[broker_name]
        return gone

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

    def for_pull(self, broker_name: str, broker_id: int) -> tuple[str, bool] | None:
        """(address, whether it is a replica) of the wanted broker id, else of the next one, else of any."""
        addrs = self._addrs.get(broker_name)
        if not addrs:
            return None
        chosen = broker_id if broker_id in addrs else broker_id + 1 if broker_id + 1 in addrs else min(addrs)
        return addrs[chosen], chosen != MASTER_ID

    def addresses(self, *, replicas: bool) -> set[str]:
        """Of all masters, and with `replicas` of all the others."""
        return {
            addr
            for addrs in self._addrs.values()
            for broker_id, addr in addrs.items()
            if replicas or broker_id == MASTER_ID
        }

    def addresses_of(self, topic: str, *, replicas: bool = False) -> list[str]:
        route = self._routes.get(topic)
        if route is None:
            return []
        return sorted(
            addr
            for broker in route.data.broker_datas
            for broker_id, addr in broker.broker_addrs.items()
            if replicas or broker_id == MASTER_ID
        )
