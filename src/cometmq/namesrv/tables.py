"""The name server's state: live brokers and topic routes. It uses no sockets; callers pass the time in ms.

There are five tables, as in Apache's RouteInfoManager: the queues by topic and broker name, the addresses by
broker name and id, the broker names by cluster and, by broker address, the time of the last registration or
heartbeat and the filter servers. Two more (topics by broker name, addresses by connection) are derived from
these, so that the work for an event depends on one broker only.

Methods for events change the tables and return what the caller needs to answer the request. Queries return
copies that the caller may keep. The behaviour is that of 4.9.7, except for three cases in which 4.9.7 loses
routes:

- Unregistering a broker removes only its own address, not a new address that has taken over its broker id.
- A lost connection removes every broker that registered over it, not only the first such broker.
- If a broker has registered again over a new connection, closing its old connection does not remove it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from cometmq.errors import CommandError
from cometmq.protocol import bodies
from cometmq.protocol.codes import MASTER_ID, Perm

# The default time in ms after which a silent broker expires (BROKER_CHANNEL_EXPIRED_TIME).
EXPIRY_MS = 120_000
# Limits of the tables. They are far larger than any real cluster and protect the server's memory, because
# without access control any client may register brokers.
MAX_BROKERS = 5_000
MAX_TOPICS = 200_000
MAX_QUEUES = 2_000_000  # maximum entries, one per topic and broker; 2,000,000 entries take 400 MB


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a REGISTER_BROKER request."""

    cluster: str
    broker_name: str
    broker_addr: str
    broker_id: int
    ha_server_addr: str | None = None
    data_version: bodies.DataVersion
    topics: Mapping[str, bodies.TopicConfig] = {}
    filter_servers: list[str] | None = None  # None from a broker older than 3.0.11, which sends none
    heartbeat_timeout_ms: int | None = None  # The time after which this broker expires, if it sets one (5.x)
    zone_name: str | None = None
    # Whether to refuse an unknown broker with only one topic: its others would seem to be deleted (5.x)
    single_topic_needs_known: bool = False
    replaces_topics: bool = False  # Whether topics that are not listed are removed


class Registered(NamedTuple):
    """The number of topics left out, as they exceed the limits; for a slave, its live master's addresses.

    `rival` is the address of another live broker that registers with the same name and id, if there is one.
    """

    left_out: int = 0
    ha_server_addr: str | None = None
    master_addr: str | None = None
    rival: str | None = None


class LiveBroker(msgspec.Struct):
    """A live broker process, which is identified by its address."""

    broker_name: str
    last_update_ms: int
    timeout_ms: int
    data_version: bodies.DataVersion
    ha_server_addr: str | None
    connection: Hashable


class Broker(msgspec.Struct):
    """A broker name, and the addresses by id of the processes (master and slaves) that share it."""

    cluster: str
    name: str
    addrs: dict[int, str]
    zone_name: str | None = None
    replaced: dict[int, str] = {}
    """By id: the address that the present one has replaced, until it registers with another id."""


class RouteTables:
    """The route tables and the events that change them."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, bodies.QueueData]] = {}
        self._brokers: dict[str, Broker] = {}
        self._clusters: dict[str, dict[str, None]] = {}
        self._live: dict[str, LiveBroker] = {}
        self.filters: dict[str, list[str]] = {}
        self._topics_of: dict[str, set[str]] = {}
        self.addrs_of: dict[Hashable, set[str]] = {}
        self._queue_count = 0  # total number of entries in `_topics`, one per topic and broker name

    # -- events

    def register(self, now_ms: int, registration: Registration, connection: Hashable = None) -> Registered:
        """Register a broker, its topics, and the connection over which it registers. Raises CommandError."""
        broker = self._brokers.get(registration.broker_name)
        known = broker is not None and registration.broker_id in broker.addrs
        if registration.single_topic_needs_known and not known and len(registration.topics) == 1:
            raise CommandError.failed("register broker failed")
        if registration.broker_addr not in self._live and len(self._live) >= MAX_BROKERS:
            raise CommandError.failed(f"the limit of {MAX_BROKERS} registered brokers is reached")
        if broker is None:
            broker = Broker(registration.cluster, registration.broker_name, {})
            self._brokers[registration.broker_name] = broker
        elif broker.cluster != registration.cluster:
            self._leave_cluster(broker)
            broker.cluster = registration.cluster
        self._clusters.setdefault(registration.cluster, {})[registration.broker_name] = None
        broker.zone_name = registration.zone_name
        rival = self._put_address(broker, registration)
        is_master = registration.broker_id == MASTER_ID
        left_out = self._put_topics(registration, first=not known) if is_master else 0
        self._put_liveness(now_ms, registration, connection)
        if registration.filter_servers:
            self.filters[registration.broker_addr] = list(registration.filter_servers)
        elif registration.filter_servers is not None:
            self.filters.pop(registration.broker_addr, None)
        master_addr = broker.addrs.get(MASTER_ID)
        master = self._live.get(master_addr) if master_addr is not None else None
        if master is None or is_master:
            return Registered(left_out, rival=rival)
        return Registered(left_out, master.ha_server_addr, master_addr, rival)

    def unregister(self, broker_addr: str, broker_name: str) -> None:
        """Remove a broker at its own request, unless its address is now registered under another name."""
        live = self._live.get(broker_addr)
        if live is not None and live.broker_name == broker_name:
            self._remove_broker(broker_addr)

    def connection_lost(self, connection: Hashable) -> Iterator[str]:
        """Remove the brokers that registered over a closed connection. Yield each address after its removal.

        With 100,000 topics, the removal of one broker takes 0.1 s, so the caller should let the event loop
        run between two removals.
        """
        for addr in sorted(self.addrs_of.get(connection, ())):
            if addr in self.addrs_of.get(connection, ()):  # skip a broker that registered again meanwhile
                self._remove_broker(addr)
                yield addr

    def scan(self, now_ms: int) -> Iterator[tuple[str, Hashable]]:
        """Remove brokers that were silent for too long. Yield their addresses and connections."""
        for addr in list(self._live):
            live = self._live.get(addr)
            if live is not None and live.last_update_ms + live.timeout_ms < now_ms:
                self._remove_broker(addr)
                yield addr, live.connection

    def heartbeat(self, now_ms: int, broker_addr: str) -> bool:
        """Record a heartbeat. Return False for an unknown broker."""
        live = self._live.get(broker_addr)
        if live is None:
            return False
        live.last_update_ms = now_ms
        return True

    def query_data_version(
        self, now_ms: int, broker_addr: str, version: bodies.DataVersion
    ) -> tuple[bool, bodies.DataVersion | None]:
        """Return whether `version` differs from the registered version, and that version, None if unknown.

        A query with the registered version counts as a heartbeat.
        """
        live = self._live.get(broker_addr)
        if live is not None and live.data_version == version:
            live.last_update_ms = now_ms
            return False, version
        return True, None if live is None else live.data_version

    def register_topic(self, topic: str, queues: Iterable[bodies.QueueData]) -> bool:
        """Register a topic's queues on known brokers. Return False if a limit is exceeded."""
        known = [queue for queue in queues if queue.broker_name in self._brokers]
        return all(self._put_queue(topic, queue) for queue in known)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Delete the route of a topic, on the brokers of `cluster` or, without a cluster, on all brokers."""
        queues = self._topics.get(topic, {})
        for name in list(self._clusters.get(cluster, ()) if cluster else queues):
            if name in queues:
                self._drop_queue(topic, name)

    def wipe_write_perm(self, broker_name: str) -> int:
        """Remove the write permission from all topics of a broker name. Return the number of its topics."""
        return self._change_perm(broker_name, lambda perm: perm & ~Perm.WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Set all topics of a broker name to read and write permission. Return the number of its topics."""
        return self._change_perm(broker_name, lambda _: Perm.READ | Perm.WRITE)

    # -- queries

    def route(self, topic: str) -> bodies.TopicRouteData | None:
        """Return the route of a topic, or None if no broker has the topic."""
        queues = self._topics.get(topic)
        if not queues:
            return None
        brokers = [self._brokers[name] for name in queues if name in self._brokers]
        if not brokers:
            return None
        filters = {
            addr: list(self.filters[addr])
            for broker in brokers
            for addr in broker.addrs.values()
            if addr in self.filters
        }
        return bodies.TopicRouteData(
            queue_datas=list(queues.values()),
            broker_datas=[self._data_of(broker) for broker in brokers],
            filter_server_table=filters,
        )

    def cluster_info(self) -> bodies.ClusterInfo:
        """Return the broker names of each cluster and the addresses of each broker name."""
        return bodies.ClusterInfo(
            broker_addr_table={name: self._data_of(broker) for name, broker in self._brokers.items()},
            cluster_addr_table={cluster: list(names) for cluster, names in self._clusters.items()},
        )

    def member_group(self, cluster: str, broker_name: str) -> bodies.BrokerData:
        """Return the addresses of the broker's processes, or none if the cluster has no such broker."""
        broker = self._brokers.get(broker_name)
        if broker is None or broker.cluster != cluster:
            return bodies.BrokerData(cluster=cluster, broker_name=broker_name, broker_addrs={})
        return self._data_of(broker)

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Return the topics with queues on any broker of a cluster."""
        found: dict[str, None] = {}
        for name in self._clusters.get(cluster, ()):
            found.update(dict.fromkeys(sorted(self._topics_of.get(name, ()))))
        return list(found)

    def topics_with(self, want: Callable[[int], bool]) -> list[str]:
        """Return the topics whose system flags, as registered by their first broker, satisfy `want`."""
        items = self._topics.items()
        return [topic for topic, queues in items if want(next(iter(queues.values())).topic_sys_flag)]

    def system_topics(self) -> tuple[list[str], str | None]:
        """Return the names of all clusters and brokers, and the address of one broker, if there is any.

        The client then requests the other system topics from that broker.
        """
        names: dict[str, None] = {}
        for cluster, brokers in self._clusters.items():
            names[cluster] = None
            names.update(brokers)
        addrs = next((broker.addrs for broker in self._brokers.values() if broker.addrs), {})
        return list(names), addrs[min(addrs)] if addrs else None

    @property
    def topic_count(self) -> int:
        """The number of topics with a route."""
        return len(self._topics)

    def live(self) -> dict[str, int]:
        """Return the time in ms of the last registration or heartbeat of each live broker, by address."""
        return {addr: live.last_update_ms for addr, live in self._live.items()}

    # -- parts of a registration

    def _put_address(self, broker: Broker, registration: Registration) -> str | None:
        """Register the address. Return the address of a live broker with the same name and id, or None.

        A broker that takes the place of another one replaces its address once. If that one then registers
        again with the same id, both run.
        """
        addr, broker_id = registration.broker_addr, registration.broker_id
        # An address has only one broker id. If a slave has become the master, remove the slave's old id.
        for table in (broker.addrs, broker.replaced):
            for other_id, known in list(table.items()):
                if known == addr and other_id != broker_id:
                    del table[other_id]
        live = self._live.get(registration.broker_addr)
        if live is not None and live.broker_name != registration.broker_name:
            # The process has changed its broker name, so remove it from the routes of the old name.
            self._remove_broker(addr)
        before = broker.addrs.get(broker_id, addr)
        broker.addrs[broker_id] = addr
        if before == addr:
            return None
        returned = broker.replaced.get(broker_id) == addr
        broker.replaced = {each: old for each, old in broker.replaced.items() if old in self._live}
        broker.replaced[broker_id] = before
        return before if returned and before in self._live else None

    def _put_topics(self, registration: Registration, *, first: bool) -> int:
        """Register the topics of a broker. Return the number of topics left out because of the limits."""
        live = self._live.get(registration.broker_addr)
        if not first and live is not None and live.data_version == registration.data_version:
            return 0
        if registration.replaces_topics:
            for topic in self._topics_of.get(registration.broker_name, set()) - registration.topics.keys():
                self._drop_queue(topic, registration.broker_name)
        left_out = 0
        for topic, config in registration.topics.items():
            queue = bodies.QueueData(
                broker_name=registration.broker_name,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=config.perm,
                topic_sys_flag=config.topic_sys_flag,
            )
            if not self._put_queue(topic, queue):
                left_out += 1
        return left_out

    def _put_liveness(self, now_ms: int, registration: Registration, connection: Hashable) -> None:
        self._forget_liveness(registration.broker_addr, filters=False)
        timeout_ms = registration.heartbeat_timeout_ms
        self._live[registration.broker_addr] = LiveBroker(
            registration.broker_name,
            now_ms,
            EXPIRY_MS if timeout_ms is None else timeout_ms,
            registration.data_version,
            registration.ha_server_addr,
            connection,
        )
        if connection is not None:
            self.addrs_of.setdefault(connection, set()).add(registration.broker_addr)

    # -- removal

    def _remove_broker(self, addr: str) -> None:
        """Remove a broker process. With the last one of a broker name, remove the name and its queues."""
        live = self._forget_liveness(addr)
        broker = None if live is None else self._brokers.get(live.broker_name)
        if broker is None:
            return
        for broker_id, known in list(broker.addrs.items()):
            if known == addr:
                self._drop_address(broker, broker_id)

    def _forget_liveness(self, addr: str, *, filters: bool = True) -> LiveBroker | None:
        live = self._live.pop(addr, None)
        if filters:
            self.filters.pop(addr, None)
        if live is not None and live.connection is not None:
            addrs = self.addrs_of[live.connection]
            addrs.discard(addr)
            if not addrs:
                del self.addrs_of[live.connection]
        return live

    def _drop_address(self, broker: Broker, broker_id: int) -> None:
        del broker.addrs[broker_id]
        if broker.addrs:
            return
        del self._brokers[broker.name]
        self._leave_cluster(broker)
        for topic in list(self._topics_of.get(broker.name, ())):
            self._drop_queue(topic, broker.name)

    def _leave_cluster(self, broker: Broker) -> None:
        names = self._clusters.get(broker.cluster)
        if names is not None:
            names.pop(broker.name, None)
            if not names:
                del self._clusters[broker.cluster]

    # -- queues

    def _put_queue(self, topic: str, queue: bodies.QueueData) -> bool:
        """Set the queues of a topic on one broker. Return False if a new entry would exceed a limit."""
        queues = self._topics.get(topic)
        if queues is None or queue.broker_name not in queues:
            if self._queue_count >= MAX_QUEUES or (queues is None and len(self._topics) >= MAX_TOPICS):
                return False
            self._queue_count += 1
            if queues is None:
                queues = self._topics[topic] = {}
        queues[queue.broker_name] = queue
        self._topics_of.setdefault(queue.broker_name, set()).add(topic)
        return True

    def _drop_queue(self, topic: str, broker_name: str) -> None:
        queues = self._topics[topic]
        del queues[broker_name]
        self._queue_count -= 1
        if not queues:
            del self._topics[topic]
        topics = self._topics_of[broker_name]
        topics.discard(topic)
        if not topics:
            del self._topics_of[broker_name]

    def _change_perm(self, broker_name: str, change: Callable[[int], int]) -> int:
        topics = self._topics_of.get(broker_name, set())
        for topic in topics:
            queues = self._topics[topic]
            queue = queues[broker_name]
            queues[broker_name] = msgspec.structs.replace(queue, perm=change(queue.perm))
        return len(topics)

    def _data_of(self, broker: Broker) -> bodies.BrokerData:
        return bodies.BrokerData(
            cluster=broker.cluster, broker_name=broker.name, broker_addrs=dict(broker.addrs)
        )
