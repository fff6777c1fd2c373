"""Apache's own mqadmin, in each version, on our servers: its output is derived from our responses."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.broker.lite.conftest import GROUP, PARENT, LiteClient
from tests.interop.driver import Driver, body_of, message
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.mqadmin import AdminShell
from tests.interop.space import Cluster, Space
from tests.kit.brokers import Peer
from tests.kit.waiting import wait_until
from tests.long_form import long_form

from cometmq import Message, SyncProducer, SyncPushConsumer


@pytest.fixture(params=SERVER_VERSIONS)
def shell(request: pytest.FixtureRequest, admin_shells: Callable[[str], AdminShell]) -> AdminShell:
    return admin_shells(request.param)


@pytest.fixture
def space(java_clients: Callable[[str], Driver], cluster: Cluster) -> Iterator[Space]:
    room = Space(java_clients("4.9.8"), cluster)
    yield room
    room.close()


@pytest.fixture
def mqadmin(shell: AdminShell, cluster: Cluster) -> Callable[[str], str]:
    def run(line: str) -> str:
        printed = shell.run(*line.split(), "-n", cluster.namesrv)
        assert "Exception" not in printed, printed
        return printed

    return run


Run = Callable[[str], str]


def test_topics_are_made_listed_described_and_deleted(mqadmin: Run, space: Space) -> None:
    topic = f"Made{space.number}"
    made = mqadmin(f"updateTopic -c DefaultCluster -t {topic} -r 6 -w 5")
    assert f"create topic to {space.cluster.broker_addr} success" in made
    assert topic in mqadmin("topicList").split()
    route = mqadmin(f"topicRoute -t {topic}")
    assert re.search(r'"readQueueNums":\s*6', route)
    assert re.search(r'"writeQueueNums":\s*5', route)
    assert space.cluster.broker_addr in route
    assert "success" in mqadmin(f"deleteTopic -c DefaultCluster -t {topic}")
    assert topic not in mqadmin("topicList").split()


def test_the_cluster_and_its_broker_are_shown(mqadmin: Run, space: Space) -> None:
    (line,) = [
        each.split() for each in mqadmin("clusterList").splitlines() if each.startswith("DefaultCluster")
    ]
    assert line[1:4] == ["broker-a", "0", space.cluster.broker_addr]
    status = mqadmin(f"brokerStatus -b {space.cluster.broker_addr}")
    names = ["bootTimestamp", "brokerVersionDesc", "commitLogMaxOffset", "msgPutTotalTodayNow", "runtime"]
    assert [name for name in names if name not in status] == []
    assert "storePathRootDir" in mqadmin(f"getBrokerConfig -b {space.cluster.broker_addr}")


@long_form("consumers of both versions start")
def test_queues_and_consumers_are_counted(shell: AdminShell, mqadmin: Run, space: Space) -> None:
    producer = space.producer(group="admin-producers", heartbeatMillis=500)
    space.java.send(producer, [message(space.topic, b"m%d" % n) for n in range(10)], "selector", select=1)
    status = [each.split() for each in mqadmin(f"topicStatus -t {space.topic}").splitlines()[1:]]
    rows = {int(each[1]): (int(each[2]), int(each[3])) for each in status if each[:1] == ["broker-a"]}
    assert rows == {0: (0, 0), 1: (0, 10), 2: (0, 0), 3: (0, 0)}
    consumer = space.push()
    space.java.wait_delivered(consumer, 10)

    def total() -> int:
        # Before the first commit the command fails, or prints no topic and a sum of zero.
        printed = shell.run("consumerProgress", "-g", space.group, "-n", space.cluster.namesrv)
        found = re.search(r"Diff Total:\s*(\d+)", printed)
        return int(found[1]) if found and space.topic in printed else -1

    wait_until("offsets committed", lambda: total() == 0, every_s=0.5)
    assert space.topic in mqadmin(f"consumerProgress -g {space.group}")
    connection = mqadmin(f"consumerConnection -g {space.group}")
    assert "CONSUME_PASSIVELY" in connection
    assert "CLUSTERING" in connection
    assert f"{space.topic}" in connection
    line = f"producerConnection -g admin-producers -t {space.topic} -n {space.cluster.namesrv}"
    wait_until("the producer's heartbeat", lambda: "127.0.0.1" in shell.run(*line.split()), every_s=0.5)


def test_messages_are_found_by_id_key_and_unique_key(shell: AdminShell, mqadmin: Run, space: Space) -> None:
    producer = space.producer()
    (sent,) = space.java.send(producer, [message(space.topic, b"look me up", keys="needle", tags="hay")])
    topic = f" -t {space.topic}" if shell.version.startswith("5") else ""
    by_id = mqadmin(f"queryMsgById -i {sent['offsetMsgId']}{topic}")
    assert sent["msgId"] in by_id
    assert "hay" in by_id
    assert sent["msgId"] in mqadmin(f"queryMsgByKey -t {space.topic} -k needle")
    by_unique = mqadmin(f"queryMsgByUniqueKey -t {space.topic} -i {sent['msgId']}")
    assert re.search(rf"Queue Offset:\s*{sent['queueOffset']}\n", by_unique)
    assert re.search(r"Keys:\s*\[needle\]", by_unique)


def test_our_consumers_say_how_fast_they_are(mqadmin: Run, space: Space) -> None:
    handled = threading.Event()
    namesrv = space.cluster.namesrv
    with SyncProducer("p", namesrv=namesrv) as producer:
        producer.send(Message(space.topic, b"x"))
    consumer = SyncPushConsumer(space.group, lambda messages: handled.set(), space.topic, namesrv=namesrv)
    with consumer:
        assert handled.wait(20)
        told = mqadmin(f"consumerStatus -g {space.group} -i {consumer.health().client_id}")
    rows = told.partition("#Consumer RT&TPS#")[2].splitlines()
    (row,) = [each.split() for each in rows if each.startswith(f"{space.topic} ")]
    assert len([float(figure) for figure in row[1:]]) == 6


# One version is enough.
@long_form("the client pauses ten seconds over it")
@pytest.mark.parametrize("shell", ["4.9.7"], indirect=True)
def test_offsets_are_reset_while_a_consumer_runs(shell: AdminShell, space: Space) -> None:
    producer = space.producer()
    space.java.send(producer, [message(space.topic, b"again")])
    consumer = space.push()
    space.java.wait_delivered(consumer, 1)
    line = f"resetOffsetByTime -g {space.group} -t {space.topic} -s 0 -n {space.cluster.namesrv}"
    # As with Apache's broker, the reset is refused until the consumer has committed an offset of every queue.
    wait_until("offsets reset", lambda: "Exception" not in shell.run(*line.split()), every_s=0.5)
    got = space.java.wait_delivered(consumer, 2)
    assert {body_of(each) for each in got} == {b"again"}


@pytest.mark.parametrize("shell", ["5.5.0"], indirect=True)
def test_lite_topics_are_shown(mqadmin: Run, cluster: Cluster) -> None:
    mqadmin(f"updateTopic -c DefaultCluster -t {PARENT} -a +message.type=LITE")
    mqadmin(f"updateSubGroup -c DefaultCluster -g {GROUP} --attributes +lite.bind.topic={PARENT}")

    async def consume() -> None:
        async with Peer(cluster.broker_addr) as peer:
            client = LiteClient(peer)
            await client.send("s1", "1", "2", "3")
            await client.subscribe("s1", "s2")
            assert await client.take(1) == ["1"]

    asyncio.run(consume())

    def row(line: str, number: int = 2) -> list[str]:
        return mqadmin(line).splitlines()[number].split()

    on_group = f"-p {PARENT} -g {GROUP}"
    detail = mqadmin("getBrokerLiteInfo -c DefaultCluster -d").splitlines()
    assert detail[1].split()[1:5] == ["default", "10000000", "1", "2"]
    assert detail[2:4] == [f'Topic Meta: {{"{PARENT}":-1}}', f'Group Meta: {{"{PARENT}":["{GROUP}"]}}']
    assert row(f"getParentTopicInfo -p {PARENT}")[1:] == ["-1", "1", "1", f"[{GROUP}]"]
    assert row(f"getLiteTopicInfo -p {PARENT} -l s1")[1:3] == ["0", "3"]
    assert "[c1@agents]" in mqadmin(f"getLiteTopicInfo -p {PARENT} -l s1 -s")
    assert row(f"getLiteClientInfo {on_group} -c c1")[1] == "2"
    assert row(f"getLiteGroupInfo {on_group} -l s1")[1:4] == ["3", "1", "2"]
    shown = mqadmin(f"getLiteGroupInfo {on_group}")
    assert "Total Lag Count: 2" in shown
    assert re.search(r"1 +s1 +2 +20", shown)
    assert "dispatched" in mqadmin(f"triggerLiteDispatch {on_group}")
