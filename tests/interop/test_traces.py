"""Message traces: Java's clients and ours write them; Apache's mqadmin and ours read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.driver import Driver, message
from tests.interop.jars import SERVER_VERSIONS
from tests.interop.mqadmin import AdminShell
from tests.interop.space import Cluster, Space
from tests.interop.test_mqadmin import OURS, as_columns, our_mqadmin
from tests.kit.waiting import wait_until

from cometmq import (
    Admin,
    ClientInstance,
    ClientOptions,
    ConsumeFromWhere,
    Message,
    MessageExt,
    Producer,
    PullConsumer,
    PullOptions,
    SendResult,
    TraceOptions,
    TransactionProducer,
    TransactionState,
)

Json = dict[str, Any]


def traces(cluster: Cluster, msg_id: str) -> list[Json]:
    """Return the traces of a message as our mqadmin reads them, the oldest first."""
    if "RMQ_SYS_TRACE_TOPIC" not in our_mqadmin(cluster.namesrv, "topicList").split():
        return []  # the first trace creates the topic
    found: list[Json] = json.loads(our_mqadmin(cluster.namesrv, "queryMsgTraceById", "-i", msg_id, "--json"))
    return [view["trace"] | {"clientHost": view["clientHost"]} for view in found]


def kinds(found: list[Json]) -> list[str]:
    return sorted(trace["type"] for trace in found)


@pytest.mark.parametrize("kind", ["push", "lite"])
def test_traces_of_java_clients_are_read(space: Space, kind: str) -> None:
    producer = space.producer(trace=True, group=f"p{space.number}")
    (sent,) = space.java.send(producer, [message(space.topic, b"hello", tags="TagA", keys="k1 k2")])
    if kind == "push":
        consumer = space.push(trace=True)
        space.java.wait_delivered(consumer, 1)
    else:
        consumer = space.lite(trace=True)
        wait_until("the message", lambda: space.java.call("lite_poll", name=consumer))

    # 4.9 sends traces after 500 ms and 5.x after 5 s; 5.x loses waiting traces when it stops.
    found = wait_until("traces", lambda: len(got := traces(space.cluster, sent["msgId"])) >= 3 and got)

    assert kinds(found) == ["Pub", "SubAfter", "SubBefore"]
    by_kind = {trace["type"]: trace for trace in found}
    pub = by_kind["Pub"]
    assert pub["costMs"] < 10_000
    assert pub == pub | {
        "region": "DefaultRegion",
        "group": f"p{space.number}",
        "topic": space.topic,
        "tags": "TagA",
        "keys": "k1 k2",
        "storeHost": space.cluster.broker_addr,
        "bodyLength": 5,
        "messageType": 0,
        "offsetMsgId": sent["offsetMsgId"],
        "success": True,
        "clientHost": "127.0.0.1",
    }
    before, after = by_kind["SubBefore"], by_kind["SubAfter"]
    assert before["requestId"] == after["requestId"]
    assert (before["group"], before["keys"], before["retryTimes"]) == (space.group, "k1 k2", 0)
    assert (after["group"], after["success"], after["contextCode"]) == (space.group, True, 0)


def test_the_trace_of_a_java_batch_is_found_by_its_ids_together(space: Space) -> None:
    producer = space.producer(trace=True)
    parts = [message(space.topic, b"part %d" % number) for number in range(2)]
    (sent,) = space.java.send(producer, parts, "batch")

    (pub,) = wait_until("a trace", lambda: traces(space.cluster, sent["msgId"]))

    assert pub["msgId"] == sent["msgId"]
    assert len(sent["msgId"].split(",")) == 2


class Commits:
    def execute_local_transaction(self, message: MessageExt, argument: object) -> TransactionState:
        return TransactionState.COMMIT

    def check_local_transaction(self, message: MessageExt) -> TransactionState:
        return TransactionState.COMMIT


async def traced_life(namesrv: str, topic: str, group: str) -> list[SendResult]:
    """Send and poll a message and a transaction with traces, with our clients."""
    options = PullOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with ClientInstance(namesrv, ClientOptions(trace=TraceOptions())) as client:
        async with Producer("our-producers", client=client) as producer:
            sent = [await producer.send(Message(topic, b"hello", tags="TagA", keys=["k1"]))]
        async with TransactionProducer("our-ends", Commits(), client=client) as producer:
            sent.append(await producer.send_in_transaction(Message(topic, b"half", keys=["k2"]), None))
        async with PullConsumer(group, options=options, client=client) as consumer:
            await consumer.assign_topic(topic)
            polled: list[str] = []
            while len(polled) < len(sent):
                polled += [each.msg_id for each in await consumer.poll()]
    return sent


@pytest.mark.parametrize("version", SERVER_VERSIONS)
async def test_our_traces_on_apaches_servers(
    apache_clusters: Callable[[str], ApacheCluster], version: str
) -> None:
    cluster = apache_clusters(version)
    sent = await traced_life(cluster.namesrv, "OurTraces", "our-readers")

    async with Admin(cluster.namesrv) as admin:
        plain, half = [await admin.traces(each.msg_id) for each in sent]

    assert [type(view.trace).__name__ for view in plain] == ["Pub", "SubBefore", "SubAfter"]
    assert Counter(type(view.trace).__name__ for view in half) == Counter(
        ["Pub", "EndTransaction", "SubBefore", "SubAfter"]
    )
    assert {view.client_host for view in plain + half} == {"127.0.0.1"}


@pytest.fixture(params=SERVER_VERSIONS)
def apaches(request: pytest.FixtureRequest, admin_shells: Callable[[str], AdminShell]) -> AdminShell:
    return admin_shells(request.param)


async def test_apaches_tool_prints_our_traces_as_ours_does(
    apaches: AdminShell, java_clients: Callable[[str], Driver], cluster: Cluster
) -> None:
    space = Space(java_clients("4.9.8"), cluster)
    sent = await traced_life(cluster.namesrv, space.topic, space.group)
    assert OURS.exists()

    for msg_id in [each.msg_id for each in sent]:
        theirs = apaches.run("queryMsgTraceById", "-i", msg_id, "-n", cluster.namesrv)
        ours = our_mqadmin(cluster.namesrv, "queryMsgTraceById", "-i", msg_id)
        lines = as_columns(ours)
        assert [line[0] for line in lines] == ["#Type", "Pub", "#Type", "Sub"]
        assert [line for line in as_columns(theirs) if line[0] in ("#Type", "Pub", "Sub")] == lines
        assert [line.rstrip() for line in theirs.splitlines() if line.startswith(("#", "Pub", "Sub"))] == [
            line.rstrip() for line in ours.splitlines() if line
        ]
