"""Message traces that the endpoint writes for 5.x clients, and trace contexts that pass through it."""

from __future__ import annotations

import time

import pytest
from tests.broker.admin.test_metrics import METRICS, look, value
from tests.grpc.service.caller import SETTINGS, message
from tests.grpc.serving import M
from tests.kit.brokers import create, records
from tests.kit.waiting import until

from cometmq.admin import Admin
from cometmq.grpc.rpc.enums import Code, MessageType, TransactionResolution, TransactionSource
from cometmq.grpc.service import traces as endpoint
from cometmq.metrics import port
from cometmq.protocol import traces
from cometmq.protocol.codes import TRACE_TOPIC
from cometmq.protocol.traces import ConsumeCode, EndTransaction, Pub, Recall, SubAfter, SubBefore

TRACED = {**SETTINGS, "grpcTraceEnable": "true"}
ID = "01" + 16 * "AB"


@pytest.fixture
async def traced(start_cluster, monkeypatch):
    """A broker that stores trace records only when a test asks for it."""
    monkeypatch.setattr(endpoint, "INTERVAL_S", 3600.0)
    cluster = await start_cluster(**TRACED)
    await create(cluster.peer(), "Orders", 1, 1)
    return cluster


@pytest.fixture
async def caller(traced, connect):
    return await connect(traced)


def stored(cluster):
    """Return the number of stored trace messages."""
    return cluster.broker.parts.store.max_offset(TRACE_TOPIC, 0)


async def read(cluster, msg_id=ID):
    """Store the waiting records. Return those of a message, as `mqadmin queryMsgTraceById` reads them."""
    before = stored(cluster)
    await cluster.broker.endpoint.traces.store_all()
    await until(lambda: stored(cluster) > before)
    async with Admin(cluster.namesrv_addr) as admin:
        views = await admin.traces(msg_id)
    assert {view.client_host for view in views} == {"127.0.0.1"}
    return [view.trace for view in views]


def waiting(cluster):
    """Return the number of records that wait to be stored."""
    return sum(len(line) for line, _ in cluster.broker.endpoint.traces.lines.values())


def ends(found):
    """Return how each delivery in trace records has ended."""
    return [(each.success, each.context_code) for each in found if isinstance(each, SubAfter)]


async def test_a_send_and_its_consumption(traced, caller):
    begun_ms = int(time.time() * 1000)
    await caller.send(message(message_id=ID, tag="paid", keys=["k1", "k2"]))
    (received,) = await caller.receive()
    await caller.ack(received)
    pub, before, after = await read(traced)
    assert isinstance(pub, Pub)
    assert begun_ms <= pub.timestamp_ms <= pub.timestamp_ms + pub.cost_ms <= before.timestamp_ms
    assert (pub.group, pub.topic, pub.msg_id, pub.tags, pub.keys) == ("Orders", "Orders", ID, "paid", "k1 k2")
    assert (pub.region, pub.store_host, pub.body_length) == ("DefaultRegion", traced.addr, 4)
    assert (pub.message_type, pub.success) == (traces.MessageType.NORMAL, True)
    assert isinstance(before, SubBefore)
    assert (before.group, before.msg_id, before.retry_times, before.keys) == ("G", ID, 0, "k1 k2")
    assert isinstance(after, SubAfter)
    assert (after.request_id, after.group, after.msg_id) == (before.request_id, "G", ID)
    assert (after.success, after.context_code) == (True, ConsumeCode.SUCCESS)
    assert after.timestamp_ms - after.cost_ms <= before.timestamp_ms <= after.timestamp_ms
    async with Admin(traced.namesrv_addr) as admin:
        assert (await admin.message_by_id(ID, "Orders")).offset_msg_id == pub.offset_msg_id
        assert len(await admin.messages_by_key(TRACE_TOPIC, "k2")) == 1


async def test_messages_that_a_push_consumer_gives_back(traced, caller):
    await caller.send(message(message_id=ID))
    (received,) = await caller.receive(auto_renew=True, invisible_s=None)
    await caller.change(received, 0)
    (again,) = await caller.receive(auto_renew=True, invisible_s=None, poll_s=20)
    await caller.dead_letter(again)
    found = await read(traced)
    assert ends(found) == 2 * [(False, ConsumeCode.FAILED)]
    assert [each.retry_times for each in found if isinstance(each, SubBefore)] == [0, 1]


async def test_a_changed_lease_of_a_simple_consumer_is_no_end(traced, caller):
    await caller.send(message(message_id=ID))
    (received,) = await caller.receive()
    await caller.change(received, 60)
    await caller.ack(received)
    assert ends(await read(traced)) == [(True, ConsumeCode.SUCCESS)]


@pytest.mark.parametrize(("late", "code"), [(False, None), (True, ConsumeCode.TIME_OUT)])
async def test_an_acknowledgement_after_the_lease(traced, caller, late, code):
    """One that is repeated within the time of the lease is not recorded."""
    await caller.send(message(message_id=ID))
    (received,) = await caller.receive(invisible_s=30)
    await caller.ack(received)
    if late:
        traced.broker.endpoint.traces.now_ms = lambda: int(time.time() * 1000) + 30_000
    assert (await caller.ack(received)).status.code == Code.INVALID_RECEIPT_HANDLE
    more = [] if code is None else [(False, code)]
    assert ends(await read(traced)) == [(True, ConsumeCode.SUCCESS), *more]


@pytest.mark.parametrize(
    ("resolution", "state"),
    [(TransactionResolution.COMMIT, "COMMIT_MESSAGE"), (TransactionResolution.ROLLBACK, "ROLLBACK_MESSAGE")],
)
@pytest.mark.parametrize("checked", [False, True])
async def test_a_transaction(traced, caller, resolution, state, checked):
    sent = message(message_id=ID, message_type=MessageType.TRANSACTION)
    (entry,) = (await caller.send(sent)).entries
    request = M.EndTransactionRequest(
        topic=M.Resource(name="Orders"),
        message_id=ID,
        transaction_id=entry.transaction_id,
        resolution=resolution,
        source=TransactionSource.SOURCE_SERVER_CHECK if checked else TransactionSource.SOURCE_CLIENT,
    )
    assert (await caller.call("EndTransaction", request)).status.code == Code.OK
    pub, end = await read(traced)
    assert pub.message_type == traces.MessageType.HALF
    assert isinstance(end, EndTransaction)
    assert (end.group, end.topic, end.msg_id, end.state) == ("Orders", "Orders", ID, state)
    assert (end.transaction_id, end.from_check) == (entry.transaction_id, checked)
    assert (end.message_type, end.store_host) == (traces.MessageType.COMMIT, traced.addr)


async def test_a_recall(traced, caller):
    delayed = message(message_id=ID)
    delayed.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 3_600_000)
    (entry,) = (await caller.send(delayed)).entries
    request = M.RecallMessageRequest(topic=M.Resource(name="Orders"), recall_handle=entry.recall_handle)
    assert (await caller.call("RecallMessage", request)).status.code == Code.OK
    pub, recall = await read(traced)
    assert pub.message_type == traces.MessageType.DELAY
    assert isinstance(recall, Recall)
    assert (recall.group, recall.topic, recall.msg_id, recall.success) == ("Orders", "Orders", ID, True)


async def test_records_that_fill_a_message_are_stored_immediately(traced, caller, monkeypatch):
    monkeypatch.setattr(traces, "_BODY_BYTES", 1)
    await caller.send(message(message_id=ID), message(message_id="id-2"))
    await until(lambda: stored(traced) == 2)


async def test_a_stop_of_the_broker_stores_the_waiting_records(traced, caller):
    await caller.send(message(message_id=ID))
    assert stored(traced) == 0
    await traced.restart()
    assert stored(traced) == 1


@pytest.mark.parametrize("msg_id", ["x" * 256, "a\x7fb"])
async def test_ids_that_cannot_be_keys_are_not_traced(traced, caller, msg_id):
    assert (await caller.send(message(message_id=msg_id))).status.code == Code.OK
    assert waiting(traced) == 0


async def test_neither_trace_topics_nor_messages_with_trace_on_false_are_traced(traced, caller):
    await caller.send(message(TRACE_TOPIC))
    assert waiting(traced) == 0
    traced.broker.config.trace_on = False
    await caller.send(message())
    (received,) = await caller.receive()
    await caller.ack(received)
    assert waiting(traced) == 0


async def test_without_the_setting_nothing_is_traced(start_cluster, connect):
    cluster = await start_cluster(**SETTINGS)
    await (await connect(cluster)).send(message())
    assert waiting(cluster) == 0
    assert cluster.broker.parts.tables.topics.get(TRACE_TOPIC) is None


@pytest.mark.parametrize("cause", ["too many", "no topic", "refused"])
async def test_lost_records_are_counted_and_delay_no_call(start_cluster, connect, monkeypatch, cause):
    monkeypatch.setattr(port, "KEEP_S", 0.0)
    monkeypatch.setattr(port, "REUSE_FACTOR", 0)
    monkeypatch.setattr(endpoint, "INTERVAL_S", 3600.0)
    cluster = await start_cluster(**TRACED, **METRICS)
    caller, parts = await connect(cluster), cluster.broker.parts
    if cause == "too many":
        monkeypatch.setattr(endpoint, "MAX_WAITING_BYTES", 0)
    assert (await caller.send(message())).status.code == Code.OK
    if cause == "no topic":
        parts.tables.topics.table[TRACE_TOPIC].perm = 4
    elif cause == "refused":
        parts.store.appender.why_closed = "a test"
    await cluster.broker.endpoint.traces.store_all()
    parts.store.appender.why_closed = ""
    found = await look(parts.metrics.port)
    assert value(found, "cometmq_grpc_traces_dropped_total", node_id="broker-a") == 1
    assert stored(cluster) == 0


async def test_a_trace_context_passes_unchanged_between_grpc_and_remoting(traced, caller):
    """OpenTelemetry's propagators keep it in user properties, RocketMQ's own field is `trace_context`."""
    carried = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "baggage": "userId=alice,isProduction=false",
    }
    sent = message(message_id=ID, trace_context=carried["traceparent"])
    sent.user_properties.update(carried)
    await caller.send(sent)
    peer = traced.peer()
    (pulled,) = records(await peer.pull())
    assert {name: pulled.properties[name] for name in carried} == carried
    await peer.send(body=b"remoting", properties=carried)
    ours, theirs = sorted(await caller.receive(), key=lambda each: each.body)
    assert ours.system_properties.trace_context == carried["traceparent"]
    assert dict(ours.user_properties) == dict(theirs.user_properties) == carried
