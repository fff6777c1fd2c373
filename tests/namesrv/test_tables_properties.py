"""After any sequence of brokers' requests the tables agree with each other and with a plain model."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.namesrv.tables import EXPIRY_MS, Registration, RouteTables
from cometmq.protocol.bodies import DataVersion, TopicConfig

names = st.sampled_from(["broker-a", "broker-b", "broker-c"])
addrs = st.sampled_from([f"10.0.0.{n}:10911" for n in range(4)])
ids = st.integers(0, 2)
topics = st.frozensets(st.sampled_from(["T1", "T2", "T3", "T4"]))
clusters = st.sampled_from(["C1", "C2"])
connections = st.sampled_from(["k1", "k2", "k3"])


class Brokers(RuleBasedStateMachine):
    """`alive` is the model: (name, last heartbeat, connection) by address."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = RouteTables()
        self.now = 0
        self.alive: dict[str, tuple[str, int, str]] = {}

    @rule(
        name=names, addr=addrs, broker_id=ids, said=topics, cluster=clusters, connection=connections,
        version=st.integers(1, 2),
    )  # fmt: skip
    def register(
        self, name: str, addr: str, broker_id: int, said: frozenset[str], version: int, **more: Any
    ) -> None:
        self.tables.register(
            self.now,
            Registration(
                cluster=more["cluster"],
                broker_name=name,
                broker_addr=addr,
                broker_id=broker_id,
                data_version=DataVersion(timestamp=0, counter=version),
                topics={
                    topic: TopicConfig(
                        topic_name=topic, perm=6, read_queue_nums=4, write_queue_nums=4, topic_sys_flag=0
                    )
                    for topic in said
                },
                filter_servers=["f"] if version == 2 else [],
            ),
            more["connection"],
        )
        self.alive[addr] = (name, self.now, more["connection"])
        assert self.tables.member_group(more["cluster"], name).broker_addrs[broker_id] == addr

    @rule(name=names, addr=addrs)
    def unregister(self, name: str, addr: str) -> None:
        self.tables.unregister(addr, name)
        if addr in self.alive and self.alive[addr][0] == name:
            del self.alive[addr]

    @rule(connection=connections)
    def lose(self, connection: str) -> None:
        lost = list(self.tables.connection_lost(connection))
        assert set(lost) == {addr for addr, (_, _, over) in self.alive.items() if over == connection}
        for addr in lost:
            del self.alive[addr]

    @rule(addr=addrs)
    def heartbeat(self, addr: str) -> None:
        assert self.tables.heartbeat(self.now, addr) == (addr in self.alive)
        if addr in self.alive:
            name, _, connection = self.alive[addr]
            self.alive[addr] = (name, self.now, connection)

    @rule(passed=st.sampled_from([1, 60_000, EXPIRY_MS, EXPIRY_MS + 1]))
    def scan(self, passed: int) -> None:
        self.now += passed
        gone = {addr for addr, _ in self.tables.scan(self.now)}
        assert gone == {addr for addr, (_, last, _) in self.alive.items() if last + EXPIRY_MS < self.now}
        for addr in gone:
            del self.alive[addr]

    @rule(topic=st.sampled_from(["T1", "T2"]), cluster=st.one_of(st.none(), clusters))
    def delete_topic(self, topic: str, cluster: str | None) -> None:
        self.tables.delete_topic(topic, cluster)
        if cluster is None:
            assert topic not in self.tables.topics()

    @rule(name=names)
    def wipe(self, name: str) -> None:
        self.tables.wipe_write_perm(name)
        for topic in self.tables.topics():
            route = self.tables.route(topic)
            assert route is not None
            assert all(queue.perm & 2 == 0 for queue in route.queue_datas if queue.broker_name == name)

    @invariant()
    def the_living_are_those_the_model_knows(self) -> None:
        assert self.tables.live() == {addr: last for addr, (_, last, _) in self.alive.items()}

    @invariant()
    def tables_agree(self) -> None:
        info = self.tables.cluster_info()
        for name, data in info.broker_addr_table.items():
            assert data.broker_addrs, "a broker name without an address"
            assert all(self.alive[addr][0] == name for addr in data.broker_addrs.values())
            assert len(set(data.broker_addrs.values())) == len(data.broker_addrs)
            assert name in info.cluster_addr_table[data.cluster]
        members = [name for names_ in info.cluster_addr_table.values() for name in names_]
        assert sorted(members) == sorted(info.broker_addr_table)
        assert all(info.cluster_addr_table.values())

    @invariant()
    def every_topic_has_a_route_to_known_brokers(self) -> None:
        info = self.tables.cluster_info()
        for topic in self.tables.topics():
            route = self.tables.route(topic)
            assert route is not None
            names_ = [queue.broker_name for queue in route.queue_datas]
            assert names_
            assert set(names_) <= set(info.broker_addr_table)
            assert sorted(names_) == sorted(data.broker_name for data in route.broker_datas)
            assert set(route.filter_server_table) <= set(self.alive)
        by_cluster = {
            topic for cluster in info.cluster_addr_table for topic in self.tables.topics_of_cluster(cluster)
        }
        assert by_cluster == set(self.tables.topics())

    @invariant()
    def nothing_is_kept_for_the_gone(self) -> None:
        assert set(self.tables.filters) <= set(self.alive)
        kept = {addr for of in self.tables.addrs_of.values() for addr in of}
        assert kept == set(self.alive)
        assert all(self.tables.addrs_of.values())


TestBrokers = Brokers.TestCase
TestBrokers.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
