"""The name server's state: who is alive, and where topics live. No sockets, no clock: callers give `now_ms`.

Five tables, as Apache's RouteInfoManager has them: topic -> broker name -> queues; broker name -> addresses
by id; cluster -> broker names; address -> liveness; address -> filter servers. Two more are derived, so
that work is proportional to the broker it concerns: topics of a broker name, and addresses registered over
a connection.

Events change the tables and return what the caller has to do or answer; queries return values that are safe
to keep. Behaviour is 4.9.7's, with three deviations that each cure a loss of routes:

- a broker that unregisters takes away its own address only, not another one that took over its id since;
- a lost connection removes every broker that registered over it, not the first one found;
- a later registration over a new connection is not undone when the old connection closes at last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import msgspec

from cometmq.protocol.bodies import (
    BrokerData,
    ClusterInfo,
    DataVersion,
    QueueData,
    TopicConfig,
    TopicRouteData,
)
from cometmq.protocol.codes import MASTER_ID, Perm

# A broker that is silent for this long is gone (BROKER_CHANNEL_EXPIRED_TIME).
EXPIRY_MS = 120_000
# Bounds of the tables, far beyond any cluster: without access control whoever reaches the port may register.
BROKERS_MAX = 5_000
TOPICS_MAX = 200_000
QUEUES_MAX = 2_000_000  # one for each broker of each topic: 100 brokers with 20,000 topics, 400 MB


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker says of itself in REGISTER_BROKER.

    filter_servers None: nothing said about them (brokers older than 3.0.11). heartbeat_timeout_ms: 5.x
    brokers choose their own expiry. single_topic_needs_known: 5.x's rule that an unknown broker may not
    begin with the registration of a single topic, because the rest of its topics would seem gone.
    replaces_topics: topics that it does not name are gone (deleteTopicWithBrokerRegistration).
    """

    cluster: str
    broker_name: str
    broker_addr: str
    broker_id: int
    ha_server_addr: str | None = None
    data_version: DataVersion
    topics: Mapping[str, TopicConfig] = {}
    filter_servers: list[str] | None = None
    heartbeat_timeout_ms: int | None = None
    zone_name: str | None = None
    single_topic_needs_known: bool = False
    replaces_topics: bool = False


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a registration; the addresses only for a slave whose master is known.

    refusal: why nothing was registered, "" if it was; left_out: topics for which there was no room.
    """

    refusal: str = ""
    left_out: int = 0
    ha_server_addr: str | None = None
    master_addr: str | None = None


class LiveBroker(msgspec.Struct):
    """One broker process, by address."""

    cluster: str
    broker_name: str
    broker_id: int
    last_update_ms: int
    timeout_ms: int
    data_version: DataVersion
    ha_server_addr: str | None
    connection: Hashable


class Expired(msgspec.Struct, frozen=True):
    """A broker that was silent for too long; its connection is to be closed."""

    broker_addr: str
    connection: Hashable


class Broker(msgspec.Struct):
    """The processes of one broker name."""

    cluster: str
    name: str
    addrs: dict[int, str]
    zone_name: str | None = None


class RouteTables:
    """All tables, and the events that change them."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._brokers: dict[str, Broker] = {}
        self._clusters: dict[str, dict[str, None]] = {}
        self._live: dict[str, LiveBroker] = {}
        self.filters: dict[str, list[str]] = {}
        self._topics_of: dict[str, set[str]] = {}
        self.addrs_of: dict[Hashable, set[str]] = {}
        self._queue_count = 0  # of all topics together

    # -- events

    def register(self, now_ms: int, said: Registration, connection: Hashable = None) -> Registered:
        """A broker registered over `connection`."""
        broker = self._brokers.get(said.broker_name)
        known = broker is not None and said.broker_id in broker.addrs
        if said.single_topic_needs_known and not known and len(said.topics) == 1:
            return Registered(refusal="register broker failed")
        if said.broker_addr not in self._live and len(self._live) >= BROKERS_MAX:
            return Registered(refusal=f"{BROKERS_MAX} brokers are registered, and no more are kept")
        if broker is None:
            broker = Broker(said.cluster, said.broker_name, {})
            self._brokers[said.broker_name] = broker
        elif broker.cluster != said.cluster:
            self._leave_cluster(broker)
            broker.cluster = said.cluster
        self._clusters.setdefault(said.cluster, {})[said.broker_name] = None
        broker.zone_name = said.zone_name
        self._put_address(broker, said)
        left_out = self._put_topics(said, first=not known) if said.broker_id == MASTER_ID else 0
        self._put_liveness(now_ms, said, connection)
        if said.filter_servers:
            self.filters[said.broker_addr] = list(said.filter_servers)
        elif said.filter_servers is not None:
            self.filters.pop(said.broker_addr, None)
        master_addr = broker.addrs.get(MASTER_ID)
        master = self._live.get(master_addr) if master_addr is not None else None
        if master is None or said.broker_id == MASTER_ID:
            return Registered(left_out=left_out)
        return Registered(left_out=left_out, ha_server_addr=master.ha_server_addr, master_addr=master_addr)

    def unregister(self, broker_addr: str, broker_name: str) -> None:
        """A broker leaves on its own."""
        live = self._live.get(broker_addr)
        if live is not None and live.broker_name == broker_name:
            self._remove_broker(broker_addr)

    def connection_lost(self, connection: Hashable) -> Iterator[str]:
        """A connection closed: remove the brokers that registered over it. Yields each address once it is
        removed, which takes a tenth of a second for 100,000 topics: others may have turns in between."""
        for addr in sorted(self.addrs_of.get(connection, ())):
            if addr in self.addrs_of.get(connection, ()):  # it has not come back meanwhile
                self._remove_broker(addr)
                yield addr

    def scan(self, now_ms: int) -> Iterator[Expired]:
        """Remove brokers that were silent for longer than their time-out. Yields as connection_lost."""
        for addr in list(self._live):
            live = self._live.get(addr)
            if live is not None and live.last_update_ms + live.timeout_ms < now_ms:
                self._remove_broker(addr)
                yield Expired(addr, live.connection)

    def heartbeat(self, now_ms: int, broker_addr: str) -> bool:
        """BROKER_HEARTBEAT: a known broker lives. False if it is not known."""
        live = self._live.get(broker_addr)
        if live is None:
            return False
        live.last_update_ms = now_ms
        return True

    def query_data_version(
        self, now_ms: int, broker_addr: str, version: DataVersion
    ) -> tuple[bool, DataVersion | None]:
        """(changed, the version held here). An equal version counts as a sign of life."""
        live = self._live.get(broker_addr)
        if live is None:
            return True, None
        if live.data_version == version:
            live.last_update_ms = now_ms
            return False, live.data_version
        return True, live.data_version

    def register_topic(self, topic: str, queues: Iterable[QueueData]) -> bool:
        """REGISTER_TOPIC_IN_NAMESRV: queues of one topic, on brokers that are known. False: no room."""
        known = [queue for queue in queues if queue.broker_name in self._brokers]
        return all(self._put_queue(topic, queue) for queue in known)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Forget a topic, everywhere or on the brokers of one cluster."""
        queues = self._topics.get(topic, {})
        for name in list(self._clusters.get(cluster, ()) if cluster else queues):
            if name in queues:
                self._drop_queue(topic, name)

    def wipe_write_perm(self, broker_name: str) -> int:
        """Take the write permission from all topics of a broker name; returns how many topics it has."""
        return self._change_perm(broker_name, lambda perm: perm & ~Perm.WRITE)

    def add_write_perm(self, broker_name: str) -> int:
        """Give read and write permission to all topics of a broker name; returns how many topics it has."""
        return self._change_perm(broker_name, lambda _: Perm.READ | Perm.WRITE)

    # -- queries

    def route(self, topic: str) -> TopicRouteData | None:
        """Where a topic lives; None if nowhere."""
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
        return TopicRouteData(
            queue_datas=list(queues.values()),
            broker_datas=[self._data_of(broker) for broker in brokers],
            filter_server_table=filters,
        )

    def cluster_info(self) -> ClusterInfo:
        """All brokers and clusters."""
        return ClusterInfo(
            broker_addr_table={name: self._data_of(broker) for name, broker in self._brokers.items()},
            cluster_addr_table={cluster: list(names) for cluster, names in self._clusters.items()},
        )

    def member_group(self, cluster: str, broker_name: str) -> BrokerData:
        """The processes of one broker name; no addresses if it is not known."""
        broker = self._brokers.get(broker_name)
        if broker is None or broker.cluster != cluster:
            return BrokerData(cluster=cluster, broker_name=broker_name, broker_addrs={})
        return self._data_of(broker)

    def topics(self) -> list[str]:
        """All topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """Topics with queues on any broker of the cluster."""
        found: dict[str, None] = {}
        for name in self._clusters.get(cluster, ()):
            found.update(dict.fromkeys(sorted(self._topics_of.get(name, ()))))
        return list(found)

    def topics_with(self, want: Callable[[int], bool]) -> list[str]:
        """Topics whose topicSysFlag satisfies `want`; a topic's first queue data speaks for it."""
        items = self._topics.items()
        return [topic for topic, queues in items if want(next(iter(queues.values())).topic_sys_flag)]

    def system_topics(self) -> tuple[list[str], str | None]:
        """(cluster and broker names, the address of some broker that knows more)."""
        names: dict[str, None] = {}
        for cluster, brokers in self._clusters.items():
            names[cluster] = None
            names.update(brokers)
        addrs = next((broker.addrs for broker in self._brokers.values() if broker.addrs), {})
        return list(names), addrs[min(addrs)] if addrs else None

    @property
    def topic_count(self) -> int:
        """Topics with a route."""
        return len(self._topics)

    def live(self) -> dict[str, int]:
        """Addresses of the brokers alive, with the time of their last word in ms."""
        return {addr: live.last_update_ms for addr, live in self._live.items()}

    # -- parts of a registration

    def _put_address(self, broker: Broker, said: Registration) -> None:
        # One address, one id: a slave that became master leaves its old id.
        for other_id, addr in list(broker.addrs.items()):
            if addr == said.broker_addr and other_id != said.broker_id:
                del broker.addrs[other_id]
        live = self._live.get(said.broker_addr)
        if live is not None and live.broker_name != said.broker_name:
            # The same process under a new broker name: its old name would stay in routes for ever.
            self._remove_broker(said.broker_addr)
        broker.addrs[said.broker_id] = said.broker_addr

    def _put_topics(self, said: Registration, *, first: bool) -> int:
        """How many topics found no room."""
        live = self._live.get(said.broker_addr)
        if not first and live is not None and live.data_version == said.data_version:
            return 0
        if said.replaces_topics:
            for topic in self._topics_of.get(said.broker_name, set()) - said.topics.keys():
                self._drop_queue(topic, said.broker_name)
        left_out = 0
        for topic, config in said.topics.items():
            queue = QueueData(
                broker_name=said.broker_name,
                read_queue_nums=config.read_queue_nums,
                write_queue_nums=config.write_queue_nums,
                perm=config.perm,
                topic_sys_flag=config.topic_sys_flag,
            )
            if not self._put_queue(topic, queue):
                left_out += 1
        return left_out

    def _put_liveness(self, now_ms: int, said: Registration, connection: Hashable) -> None:
        self._forget_liveness(said.broker_addr, filters=False)
        timeout_ms = said.heartbeat_timeout_ms
        self._live[said.broker_addr] = LiveBroker(
            cluster=said.cluster,
            broker_name=said.broker_name,
            broker_id=said.broker_id,
            last_update_ms=now_ms,
            timeout_ms=EXPIRY_MS if timeout_ms is None else timeout_ms,
            data_version=said.data_version,
            ha_server_addr=said.ha_server_addr,
            connection=connection,
        )
        if connection is not None:
            self.addrs_of.setdefault(connection, set()).add(said.broker_addr)

    # -- removal

    def _remove_broker(self, addr: str) -> None:
        """Forget a process and, with the last of its name, the name and its queues."""
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

    def _put_queue(self, topic: str, queue: QueueData) -> bool:
        """False where there is no room for another topic, or broker of a topic."""
        queues = self._topics.get(topic)
        if queues is None or queue.broker_name not in queues:
            if self._queue_count >= QUEUES_MAX or (queues is None and len(self._topics) >= TOPICS_MAX):
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

    def _data_of(self, broker: Broker) -> BrokerData:
        return BrokerData(cluster=broker.cluster, broker_name=broker.name, broker_addrs=dict(broker.addrs))
