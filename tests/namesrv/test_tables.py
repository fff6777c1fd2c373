"""The name server's tables, tested with a manual clock."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.errors import CommandError
from cometmq.namesrv.tables import EXPIRY_MS, Registered, Registration, RouteTables
from cometmq.protocol.bodies import DataVersion, QueueData, TopicConfig

T0 = 1_700_000_000_000
A, B = "10.0.0.1:10911", "10.0.0.2:10911"
CLUSTER = "DefaultCluster"


def topic(name: str, perm: int = 6, read: int = 4, write: int = 4, flag: int = 0) -> TopicConfig:
    return TopicConfig(
        topic_name=name, perm=perm, read_queue_nums=read, write_queue_nums=write, topic_sys_flag=flag
    )


def says(
    name: str = "broker-a",
    addr: str = A,
    broker_id: int = 0,
    *,
    topics: tuple[TopicConfig, ...] | tuple[str, ...] = ("TopicA",),
    version: int = 1,
    cluster: str = CLUSTER,
    **more: Any,
) -> Registration:
    configs = [topic(item) if isinstance(item, str) else item for item in topics]
    return Registration(
        cluster=cluster,
        broker_name=name,
        broker_addr=addr,
        broker_id=broker_id,
        ha_server_addr=addr.replace("10911", "10912"),
        data_version=DataVersion(timestamp=T0, counter=version),
        topics={config.topic_name: config for config in configs},
        **more,
    )


@pytest.fixture
def tables() -> RouteTables:
    return RouteTables()


def brokers_of(tables: RouteTables, name: str) -> dict[str, dict[int, str]]:
    route = tables.route(name)
    return {} if route is None else {data.broker_name: data.broker_addrs for data in route.broker_datas}


def queues_of(tables: RouteTables, name: str) -> dict[str, QueueData]:
    route = tables.route(name)
    return {} if route is None else {queue.broker_name: queue for queue in route.queue_datas}


class TestRegistration:
    def test_a_master_makes_its_topics_known(self, tables: RouteTables) -> None:
        assert tables.register(T0, says(topics=(topic("TopicA", 6, 8, 4, 1),))) == Registered()

        assert brokers_of(tables, "TopicA") == {"broker-a": {0: A}}
        queue = queues_of(tables, "TopicA")["broker-a"]
        assert (queue.read_queue_nums, queue.write_queue_nums) == (8, 4)
        assert (queue.perm, queue.topic_sys_flag) == (6, 1)
        assert tables.live() == {A: T0}

    def test_an_unknown_topic_has_no_route(self, tables: RouteTables) -> None:
        tables.register(T0, says())

        assert tables.route("Other") is None

    def test_a_slave_is_told_its_master_and_its_topics_do_not_count(self, tables: RouteTables) -> None:
        slave = says(addr=B, broker_id=1, topics=("OnlyOnSlave",))
        assert tables.register(T0, slave) == Registered()
        tables.register(T0, says())

        assert tables.register(T0, slave) == Registered(ha_server_addr="10.0.0.1:10912", master_addr=A)
        assert brokers_of(tables, "TopicA") == {"broker-a": {0: A, 1: B}}
        assert tables.route("OnlyOnSlave") is None

    @pytest.mark.parametrize(
        ("first", "second", "brokers", "clusters"),
        [
            (
                says(),
                says("broker-b", B),
                {"broker-a": {0: A}, "broker-b": {0: B}},
                {CLUSTER: ["broker-a", "broker-b"]},
            ),
            (says(broker_id=1), says(broker_id=0), {"broker-a": {0: A}}, {CLUSTER: ["broker-a"]}),
            (says(), says(addr=B), {"broker-a": {0: B}}, {CLUSTER: ["broker-a"]}),
            (says("old-name"), says("new-name"), {"new-name": {0: A}}, {CLUSTER: ["new-name"]}),
            (says(cluster="One"), says(cluster="Two"), {"broker-a": {0: A}}, {"Two": ["broker-a"]}),
        ],
        ids=["another broker", "a new id", "a new address", "a new name", "a new cluster"],
    )
    def test_a_second_registration_replaces_what_it_says_anew(
        self,
        tables: RouteTables,
        first: Registration,
        second: Registration,
        brokers: dict[str, dict[int, str]],
        clusters: dict[str, list[str]],
    ) -> None:
        tables.register(T0, first)
        tables.register(T0 + 1, second)

        assert brokers_of(tables, "TopicA") == brokers
        assert tables.cluster_info().cluster_addr_table == clusters

    def test_an_unchanged_data_version_refreshes_the_time_only(self, tables: RouteTables) -> None:
        tables.register(T0, says(version=1))
        tables.register(T0 + 5, says(version=1, topics=("TopicA", "TopicB")))
        assert tables.topics() == ["TopicA"]
        assert tables.live() == {A: T0 + 5}

        tables.register(T0 + 6, says(version=2, topics=("TopicA", "TopicB")))
        assert sorted(tables.topics()) == ["TopicA", "TopicB"]

    def test_topics_missing_from_a_later_table_stay(self, tables: RouteTables) -> None:
        tables.register(T0, says(topics=("TopicA", "TopicB")))
        tables.register(T0, says(topics=("TopicB",), version=2))

        assert sorted(tables.topics()) == ["TopicA", "TopicB"]

    def test_topics_missing_from_a_later_table_go_if_so_configured(self, tables: RouteTables) -> None:
        tables.register(T0, says(topics=("TopicA", "TopicB")))
        tables.register(T0, says("broker-b", B, topics=("TopicA",)))
        tables.register(T0, says(topics=("TopicB",), version=2, replaces_topics=True))

        assert list(queues_of(tables, "TopicA")) == ["broker-b"]
        assert list(queues_of(tables, "TopicB")) == ["broker-a"]

    def test_an_unknown_5x_broker_may_not_begin_with_a_single_topic(self, tables: RouteTables) -> None:
        single = says(topics=("TopicA",), single_topic_needs_known=True)
        with pytest.raises(CommandError, match="register broker failed"):
            tables.register(T0, single)
        assert (tables.topics(), tables.live()) == ([], {})

        tables.register(T0, says(topics=("TopicA", "TopicB"), single_topic_needs_known=True))
        assert tables.register(T0, single) == Registered()

    @pytest.mark.parametrize(
        ("later", "left"),
        [(None, ["10.0.0.1:30001"]), ([], None), (["10.0.0.1:30002"], ["10.0.0.1:30002"])],
        ids=["silence keeps", "empty clears", "new replaces"],
    )
    def test_filter_servers(
        self, tables: RouteTables, later: list[str] | None, left: list[str] | None
    ) -> None:
        tables.register(T0, says(filter_servers=["10.0.0.1:30001"]))
        tables.register(T0, says(filter_servers=later))
        route = tables.route("TopicA")

        assert route is not None
        assert route.filter_server_table.get(A) == left


class TestLeaving:
    def test_the_last_address_takes_name_cluster_and_topics_with_it(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        tables.register(T0, says(addr=B, broker_id=1))
        tables.register(T0, says("broker-b", "10.0.0.3:10911", topics=("TopicA", "TopicB")))
        tables.unregister(A, "broker-a")
        assert brokers_of(tables, "TopicA")["broker-a"] == {1: B}

        tables.unregister(B, "broker-a")
        assert list(brokers_of(tables, "TopicA")) == ["broker-b"]
        tables.unregister("10.0.0.3:10911", "broker-b")
        info = tables.cluster_info()
        assert (tables.topics(), tables.live()) == ([], {})
        assert (info.broker_addr_table, info.cluster_addr_table) == ({}, {})

    def test_a_replaced_broker_that_leaves_does_not_take_its_successor(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        tables.register(T0, says(addr="10.0.0.9:10911"))
        tables.unregister(A, "broker-a")

        assert brokers_of(tables, "TopicA") == {"broker-a": {0: "10.0.0.9:10911"}}

    def test_a_wrong_name_changes_nothing(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        tables.unregister(A, "broker-x")
        tables.unregister("10.9.9.9:10911", "broker-a")

        assert brokers_of(tables, "TopicA") == {"broker-a": {0: A}}

    def test_silence_for_120_seconds_removes_a_broker(self, tables: RouteTables) -> None:
        tables.register(T0, says(), "connection 1")
        tables.register(T0 + 1, says("broker-b", B), "connection 2")
        assert list(tables.scan(T0 + EXPIRY_MS)) == []
        gone = list(tables.scan(T0 + EXPIRY_MS + 1))

        assert gone == [(A, "connection 1")]
        assert list(brokers_of(tables, "TopicA")) == ["broker-b"]

    def test_a_5x_broker_chooses_its_own_time_out(self, tables: RouteTables) -> None:
        tables.register(T0, says(heartbeat_timeout_ms=10_000))
        assert list(tables.scan(T0 + 10_000)) == []

        assert len(list(tables.scan(T0 + 10_001))) == 1

    @pytest.mark.parametrize("sign", ["register", "heartbeat", "data version"])
    def test_signs_of_life(self, tables: RouteTables, sign: str) -> None:
        tables.register(T0, says())
        later = T0 + EXPIRY_MS
        if sign == "register":
            tables.register(later, says())
        elif sign == "heartbeat":
            assert tables.heartbeat(later, A)
        else:
            version = DataVersion(timestamp=T0, counter=1)
            assert tables.query_data_version(later, A, version) == (False, version)

        assert list(tables.scan(later + EXPIRY_MS)) == []
        assert len(list(tables.scan(later + EXPIRY_MS + 1))) == 1

    def test_another_data_version_is_no_sign_of_life(self, tables: RouteTables) -> None:
        tables.register(T0, says(version=1))
        held = DataVersion(timestamp=T0, counter=1)
        newer = DataVersion(timestamp=T0, counter=2)

        assert tables.query_data_version(T0 + 9, A, newer) == (True, held)
        assert tables.query_data_version(T0 + 9, B, newer) == (True, None)
        assert tables.live() == {A: T0}

    def test_an_unknown_broker_has_no_heartbeat(self, tables: RouteTables) -> None:
        assert not tables.heartbeat(T0, A)

    def test_a_lost_connection_removes_all_brokers_behind_it_at_once(self, tables: RouteTables) -> None:
        tables.register(T0, says(), "connection 1")
        tables.register(T0, says("broker-b", B), "connection 1")
        tables.register(T0, says("broker-c", "10.0.0.3:10911"), "connection 2")

        assert list(tables.connection_lost("connection 1")) == [A, B]
        assert list(brokers_of(tables, "TopicA")) == ["broker-c"]
        assert list(tables.connection_lost("connection 1")) == []

    def test_the_old_connection_of_a_broker_that_came_back_changes_nothing(self, tables: RouteTables) -> None:
        tables.register(T0, says(), "old")
        tables.register(T0 + 1, says(), "new")

        assert list(tables.connection_lost("old")) == []
        assert brokers_of(tables, "TopicA") == {"broker-a": {0: A}}
        assert list(tables.connection_lost("new")) == [A]

    def test_after_an_expiry_the_same_data_version_brings_the_topics_back(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        list(tables.scan(T0 + EXPIRY_MS + 1))
        tables.register(T0 + EXPIRY_MS + 2, says())

        assert tables.topics() == ["TopicA"]


class TestTopics:
    def test_a_deleted_topic_is_gone_everywhere(self, tables: RouteTables) -> None:
        tables.register(T0, says(topics=("TopicA", "TopicB")))
        tables.delete_topic("TopicA")
        tables.delete_topic("TopicX")

        assert tables.topics() == ["TopicB"]

    def test_a_topic_deleted_in_one_cluster_stays_in_others(self, tables: RouteTables) -> None:
        tables.register(T0, says(cluster="One"))
        tables.register(T0, says("broker-b", B, cluster="Two"))
        tables.delete_topic("TopicA", "One")
        assert list(queues_of(tables, "TopicA")) == ["broker-b"]

        tables.delete_topic("TopicA", "Nowhere")
        tables.delete_topic("TopicA", "Two")
        assert tables.topics() == []

    def test_write_permission_is_wiped_and_restored(self, tables: RouteTables) -> None:
        tables.register(T0, says(topics=(topic("TopicA", 6), topic("TopicB", 2), topic("TopicC", 4))))
        tables.register(T0, says("broker-b", B))
        assert tables.wipe_write_perm("broker-a") == 3
        perms = {name: queues_of(tables, name)["broker-a"].perm for name in ("TopicA", "TopicB", "TopicC")}
        assert perms == {"TopicA": 4, "TopicB": 0, "TopicC": 4}
        assert queues_of(tables, "TopicA")["broker-b"].perm == 6

        assert tables.add_write_perm("broker-a") == 3
        assert {queues_of(tables, name)["broker-a"].perm for name in perms} == {6}
        assert tables.wipe_write_perm("broker-x") == 0

    def test_a_wiped_permission_comes_back_with_a_newer_registration_only(self, tables: RouteTables) -> None:
        tables.register(T0, says(version=1))
        tables.wipe_write_perm("broker-a")
        tables.register(T0, says(version=1))
        assert queues_of(tables, "TopicA")["broker-a"].perm == 4

        tables.register(T0, says(version=2))
        assert queues_of(tables, "TopicA")["broker-a"].perm == 6

    def test_a_route_once_given_does_not_change_afterwards(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        before = tables.route("TopicA")
        assert before is not None
        tables.wipe_write_perm("broker-a")
        tables.register(T0, says(addr=B, broker_id=1))

        assert (before.queue_datas[0].perm, before.broker_datas[0].broker_addrs) == (6, {0: A})

    def test_lists(self, tables: RouteTables) -> None:
        tables.register(
            T0, says(topics=(topic("Unit", flag=1), topic("UnitSub", flag=2), topic("Both", flag=3)))
        )
        tables.register(T0, says("broker-b", B, cluster="Other", topics=("Plain",)))

        assert sorted(tables.topics()) == ["Both", "Plain", "Unit", "UnitSub"]
        assert sorted(tables.topics_of_cluster(CLUSTER)) == ["Both", "Unit", "UnitSub"]
        assert tables.topics_of_cluster("Nowhere") == []
        assert sorted(tables.topics_with(lambda flag: flag & 1 != 0)) == ["Both", "Unit"]
        assert tables.system_topics() == ([CLUSTER, "broker-a", "Other", "broker-b"], A)

    def test_empty_tables_have_empty_lists(self, tables: RouteTables) -> None:
        assert (tables.topics(), tables.system_topics()) == ([], ([], None))

    def test_single_topics_are_registered_for_known_brokers(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        data = queues_of(tables, "TopicA")["broker-a"]
        tables.register_topic("TopicN", [data])
        assert list(queues_of(tables, "TopicN")) == ["broker-a"]

        tables.unregister(A, "broker-a")
        tables.register_topic("TopicN", [data])
        assert tables.route("TopicN") is None

    def test_a_member_group_lists_the_processes_of_a_name(self, tables: RouteTables) -> None:
        tables.register(T0, says())
        tables.register(T0, says(addr=B, broker_id=1))

        group = tables.member_group(CLUSTER, "broker-a")
        assert group.broker_addrs == {0: A, 1: B}
        assert tables.member_group(CLUSTER, "broker-x").broker_addrs == {}


class TestTwoBrokersWithOneName:
    def test_a_broker_that_returns_after_it_was_replaced_has_a_rival(self, tables: RouteTables) -> None:
        found = [tables.register(T0, says(addr=addr)).rival for addr in (A, B, A, A, B)]
        assert found == [None, None, B, None, A]

    def test_a_leader_that_becomes_a_slave_and_leads_again_has_none(self, tables: RouteTables) -> None:
        for addr, broker_id in ((A, 0), (B, 1), (B, 0), (A, 1), (A, 0), (B, 1)):
            assert tables.register(T0, says(addr=addr, broker_id=broker_id)).rival is None

    def test_a_broker_that_has_gone_is_none(self, tables: RouteTables) -> None:
        tables.register(T0, says(addr=A))
        tables.register(T0, says(addr=B), "connection")
        assert list(tables.connection_lost("connection")) == [B]
        assert tables.register(T0, says(addr=A)).rival is None

    def test_addresses_that_have_gone_are_forgotten(self, tables: RouteTables) -> None:
        for number in range(5):
            tables.register(T0, says(addr=f"10.0.0.9:{number + 1}", broker_id=number), number)
            tables.register(T0, says(addr=B, broker_id=number))
            list(tables.connection_lost(number))
        assert len(tables._brokers["broker-a"].replaced) == 1  # noqa: SLF001 - not visible otherwise
