"""Producers of 5.x: routes, sends of all types, refusals, transactions and recalls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
import pytest
from tests.broker.rates.conftest import limit_group, stopped_clock
from tests.grpc.service.caller import SETTINGS, message, producer_settings
from tests.grpc.serving import M, connected
from tests.kit.brokers import create, records, refused, running
from tests.kit.waiting import until
from tests.ports import free_port

from cometmq.errors import ConnectError
from cometmq.grpc.rpc.calls import frame_message
from cometmq.grpc.rpc.enums import (
    AddressScheme,
    ClientType,
    Code,
    Encoding,
    MessageType,
    Permission,
    TransactionResolution,
    TransactionSource,
)
from cometmq.grpc.rpc.messages import SERVICE
from cometmq.grpc.service import routes
from cometmq.grpc.service.sent import MIXED, NEW_QUEUES, queue_of
from cometmq.protocol.bodies import (
    BrokerData,
    QueueData,
    TopicRouteData,
)


async def route(caller, topic="Orders", host=""):
    request = M.QueryRouteRequest(topic=M.Resource(name=topic))
    if host:
        request.endpoints.scheme = AddressScheme.DOMAIN_NAME
        request.endpoints.addresses.add(host=host, port=18081)
    return await caller.call("QueryRoute", request)


def code_of(response: Any) -> int:
    return response.status.code


class TestRoute:
    async def test_the_queues_of_a_topic_with_the_endpoints_of_the_request(self, cluster, caller):
        await create(cluster.peer(), "Orders", 3, 2)
        found = await route(caller, host="mq.example.org")
        permissions = [each.permission for each in found.message_queues]
        assert permissions == [Permission.READ, Permission.READ_WRITE, Permission.READ_WRITE]
        (address,) = found.message_queues[0].broker.endpoints.addresses
        assert (address.host, address.port) == ("mq.example.org", 18081)
        assert found.message_queues[0].broker.name == "broker-a"

    async def test_without_endpoints_in_the_request_the_brokers_own_address(self, cluster, caller):
        await create(cluster.peer())
        (address,) = (await route(caller)).message_queues[0].broker.endpoints.addresses
        assert (address.host, address.port) == ("127.0.0.1", cluster.broker.endpoint.port)

    async def test_a_topic_that_a_send_may_create_has_a_route(self, caller):
        found = await route(caller, "New")
        assert len(found.message_queues) == 4
        assert (await caller.send(message("New"))).entries[0].status.code == Code.OK

    async def test_an_unknown_topic(self, start_cluster, connect):
        cluster = await start_cluster(**SETTINGS, autoCreateTopicEnable="false")
        assert code_of(await route(await connect(cluster), "New")) == Code.TOPIC_NOT_FOUND

    @pytest.mark.parametrize(
        ("attribute", "types"),
        [
            ("", {*MIXED, MessageType.PRIORITY}),
            ("NORMAL", {MessageType.NORMAL}),
            ("FIFO", {MessageType.FIFO}),
            ("MIXED", MIXED),
        ],
    )  # fmt: skip
    async def test_the_types_that_a_topic_accepts(self, cluster, caller, attribute, types):
        attributes = f"+message.type={attribute}" if attribute else None
        await create(cluster.peer(), version=500, attributes=attributes)
        assert set((await route(caller)).message_queues[0].accept_message_types) == types

    async def test_a_client_of_5_0_gets_no_type_that_it_does_not_know(self, cluster, connect):
        caller = await connect(cluster, x_mq_client_version="5.0.8")
        assert set((await route(caller)).message_queues[0].accept_message_types) == set(MIXED)

    async def test_other_masters_of_the_name_servers(self, start_cluster, connect, monkeypatch):
        cluster = await start_cluster(**SETTINGS, grpcClusterRouteEnable="true")
        await create(cluster.peer(), "Orders", 1, 1)
        addresses = {
            "broker-b": {0: "192.0.2.7:10911"},
            "broker-c": {1: "192.0.2.8:10911"},
            "broker-a": {0: "192.0.2.6:10911"},
        }
        queues = [QueueData(broker_name=name, read_queue_nums=2, write_queue_nums=1) for name in addresses]
        brokers = [BrokerData(broker_name=name, broker_addrs=each) for name, each in addresses.items()]
        answers = [TopicRouteData(queue_datas=queues, broker_datas=brokers), None]

        async def found(topic):
            return answers.pop(0)

        endpoint = cluster.broker.endpoint

        async def unknown(broker_addr):
            raise ConnectError(broker_addr, "no answer")

        endpoint.routes.find_route, endpoint.routes.find_endpoint = found, unknown
        monkeypatch.setattr(routes, "CLUSTER_ROUTE_S", 0.0)
        caller = await connect(cluster)
        for _ in range(2):  # The second time, no name server answers
            queues = (await route(caller, host="mq.example.org")).message_queues
            assert [(each.broker.name, each.id, each.permission) for each in queues] == [
                ("broker-a", 0, Permission.READ_WRITE),
                ("broker-b", 0, Permission.READ),
                ("broker-b", 1, Permission.READ_WRITE),
            ]
            (address,) = queues[-1].broker.endpoints.addresses
            assert (address.host, address.port) == ("192.0.2.7", 18081)
        monkeypatch.setattr(routes, "CLUSTER_ROUTE_S", 60.0)
        request = M.QueryAssignmentRequest(topic=M.Resource(name="Orders"), group=M.Resource(name="G"))
        assigned = (await caller.call("QueryAssignment", request)).assignments
        assert [each.message_queue.broker.name for each in assigned] == ["broker-a", "broker-b"]

    async def test_a_broker_among_others_finds_them_and_the_ports_of_their_endpoints(
        self, start_cluster, connect, tmp_path
    ):
        cluster = await start_cluster(**SETTINGS, grpcClusterRouteEnable="true")
        await create(cluster.peer(), "Orders", 1, 1)
        other = {"brokerName": "broker-b", "namesrvAddr": cluster.namesrv_addr, "grpcPort": str(free_port())}
        async with running(tmp_path / "b", **other) as (_, peer):
            await create(peer, "Orders", 1, 1)
            queues = (await route(await connect(cluster), host="mq.example.org")).message_queues
        assert [each.broker.name for each in queues] == ["broker-a", "broker-b"]
        ports = [each.broker.endpoints.addresses[0].port for each in queues]
        assert ports == [18081, int(other["grpcPort"])]

    async def test_endpoints_that_would_make_a_huge_route_are_refused(self, cluster, caller):
        await create(cluster.peer())
        assert code_of(await route(caller, host="h" * 5000)) == Code.ILLEGAL_ACCESS_POINT
        request = M.QueryRouteRequest(topic=M.Resource(name="Orders"))
        for _ in range(17):
            request.endpoints.addresses.add()
        assert code_of(await caller.call("QueryRoute", request)) == Code.ILLEGAL_ACCESS_POINT

    async def test_a_request_without_bodies_has_at_most_a_mebibyte(self, cluster, caller):
        request = M.QueryRouteRequest(topic=M.Resource(name="x" * (1 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await caller.call("QueryRoute", request)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class TestSend:
    async def test_a_message_with_all_of_its_parts(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        sent = message(tag="paid", keys=["k1", "k2"], trace_context="00-1", body_encoding=Encoding.GZIP)
        sent.user_properties["colour"] = "red"
        response = await caller.send(sent)
        assert code_of(response) == Code.OK
        (entry,) = response.entries
        assert (entry.message_id, entry.offset, entry.status.code) == ("id-1", 0, Code.OK)
        (stored,) = records(await peer.pull())
        assert (stored.body, stored.tags, stored.keys, stored.msg_id) == (
            b"body",
            "paid",
            ("k1", "k2"),
            "id-1",
        )
        assert stored.properties["colour"] == "red"
        assert stored.properties["TRACE_CONTEXT"] == "00-1"
        assert stored.sys_flag & 1
        assert stored.born_timestamp_ms == sent.system_properties.born_timestamp.ToMilliseconds()
        assert stored.born_host.startswith("127.0.0.1:")

    async def test_messages_that_differ_only_in_id_and_time(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        for number in range(3):
            sent = message(message_id=f"id-{number}", tag="paid")
            sent.system_properties.born_timestamp.FromMilliseconds(number)
            assert (await caller.send(sent)).entries[0].message_id == f"id-{number}"
        found = records(await peer.pull())
        assert [(each.msg_id, each.born_timestamp_ms) for each in found] == [
            (f"id-{number}", number) for number in range(3)
        ]
        assert {each.tags for each in found} == {"paid"}

    async def test_a_response_that_cannot_be_made_fails_its_own_call_only(self, cluster, caller, monkeypatch):
        await create(cluster.peer())

        def failing(client, sent, *_args, **_more):
            assert sent.message_id != "id-1"

        monkeypatch.setattr(cluster.broker.endpoint.traces, "sent", failing)
        calls = (caller.send(message(message_id=f"id-{number}")) for number in range(3))
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(second, grpc.aio.AioRpcError)
        assert second.code() is grpc.StatusCode.INTERNAL
        assert code_of(first) == code_of(third) == Code.OK

    async def test_empty_tags_and_keys_do_not_count_and_blanks_divide_keys(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        assert code_of(await caller.send(message(tag="", keys=["order 17", "", "k2"]))) == Code.OK
        assert code_of(await caller.send(message(keys=[""]))) == Code.OK
        first, second = records(await peer.pull())
        assert (first.tags, first.keys) == (None, ("order", "17", "k2"))
        assert "KEYS" not in second.properties

    async def test_messages_of_a_group_are_in_one_queue(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 8, 8)
        for number in range(5):
            response = await caller.send(message(message_id=f"id-{number}", message_group="customer-7"))
            assert code_of(response) == Code.OK
        found = records(await peer.pull(queue_id=queue_of("customer-7", 8)))
        assert [each.properties["__SHARDINGKEY"] for each in found] == ["customer-7"] * 5

    async def test_the_first_message_of_a_new_topic_is_in_the_queue_of_its_group(self, cluster, caller):
        for number in range(5):
            await caller.send(message("New", message_id=f"id-{number}", message_group="customer-7"))
        found = records(await cluster.peer().pull(topic="New", queue_id=queue_of("customer-7", NEW_QUEUES)))
        assert len(found) == 5

    @pytest.mark.parametrize(
        ("group", "queues", "expected"), [("a", 1, 0), ("customer-7", 8, None), ("", 3, None)]
    )
    def test_a_queue_of_a_group_exists(self, group, queues, expected):
        found = queue_of(group, queues)
        assert 0 <= found < queues
        assert expected is None or found == expected

    def test_few_groups_move_when_a_queue_is_added(self):
        groups = [f"group-{number}" for number in range(1000)]
        moved = [group for group in groups if queue_of(group, 8) != queue_of(group, 9)]
        assert {queue_of(group, 9) for group in moved} == {8}
        assert len(moved) < 200

    async def test_a_message_with_a_delivery_time_can_be_recalled(self, cluster, caller):
        await create(cluster.peer())
        delayed = message()
        delayed.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 60_000)
        (entry,) = (await caller.send(delayed)).entries
        assert entry.recall_handle
        request = M.RecallMessageRequest(topic=M.Resource(name="Orders"), recall_handle=entry.recall_handle)
        recalled = await caller.call("RecallMessage", request)
        assert (code_of(recalled), recalled.message_id) == (Code.OK, "id-1")

    async def test_a_message_id_is_stored_once_in_a_topic_with_a_window(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, attributes="+dedup.window.ms=60000")
        once = [(await caller.send(message(message_id="id-1"))).entries[0] for _ in range(2)]
        assert [(each.status.code, each.offset) for each in once] == [(Code.OK, 0)] * 2
        assert once[0].message_id == once[1].message_id == "id-1"
        stored = [await peer.pull(queue_id=queue_id) for queue_id in range(2)]
        assert sum(len(records(answer)) for answer in stored if answer.code == 0) == 1

    @pytest.mark.parametrize(
        ("field", "value", "code"),
        [
            ("message_id", "", Code.ILLEGAL_MESSAGE_ID),
            ("message_id", "a\x02b", Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ("tag", " ", Code.ILLEGAL_MESSAGE_TAG),
            ("tag", "a|b", Code.ILLEGAL_MESSAGE_TAG),
            ("keys", [" "], Code.ILLEGAL_MESSAGE_KEY),
            ("keys", ["k"] * 1025, Code.MESSAGE_PROPERTIES_TOO_LARGE),
            ("message_group", "x" * 64, Code.ILLEGAL_MESSAGE_GROUP),
            ("priority", -1, Code.BAD_REQUEST),
            ("trace_context", "\n", Code.BAD_REQUEST),
        ],
    )
    async def test_a_bad_field_is_refused_with_its_name(self, caller, field, value, code):
        response = await caller.send(message(**{field: value}))
        assert code_of(response) == code
        assert field in response.status.message

    @pytest.mark.parametrize(
        ("topic", "body", "code"),
        [
            ("", b"x", Code.ILLEGAL_TOPIC),
            ("a b", b"x", Code.ILLEGAL_TOPIC),
            ("rmq_sys_REVIVE_LOG_DefaultCluster", b"x", Code.FORBIDDEN),
            ("Orders", b"", Code.MESSAGE_BODY_EMPTY),
            ("Orders", bytes((4 << 20) + 1), Code.MESSAGE_BODY_TOO_LARGE),
        ],
    )
    async def test_a_bad_topic_or_body_is_refused(self, caller, topic, body, code):
        assert code_of(await caller.send(message(topic, body))) == code

    @pytest.mark.parametrize(
        ("properties", "code"),
        [
            ({"UNIQ_KEY": "x"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({"__SHARDINGKEY": "x"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({"a\x01": "x"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({"a": "x\x02"}, Code.ILLEGAL_MESSAGE_PROPERTY_KEY),
            ({str(number): "x" for number in range(129)}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
            ({"a": "x" * 17_000}, Code.MESSAGE_PROPERTIES_TOO_LARGE),
        ],
    )
    async def test_bad_user_properties_are_refused(self, caller, properties, code):
        bad = message()
        bad.user_properties.update(properties)
        response = await caller.send(bad)
        assert code_of(response) == code
        assert "user_properties" in response.status.message

    @pytest.mark.parametrize(
        ("field", "code"),
        [("born_timestamp", Code.BAD_REQUEST), ("delivery_timestamp", Code.ILLEGAL_DELIVERY_TIME)],
    )
    async def test_a_time_that_does_not_exist_is_refused(self, caller, caplog, field, code):
        bad = message()
        getattr(bad.system_properties, field).seconds = 1 << 40
        response = await caller.send(bad)
        assert (code_of(response), field in response.status.message) == (code, True)
        assert "failed" not in caplog.text

    async def test_a_delivery_time_that_is_too_far_away_is_refused(self, cluster, caller):
        cluster.broker.config.timer_max_delay_sec = 60
        delayed = message()
        delayed.system_properties.delivery_timestamp.FromMilliseconds(int(time.time() * 1000) + 70_000)
        response = await caller.send(delayed)
        assert code_of(response) == Code.ILLEGAL_DELIVERY_TIME
        assert "at most 60 s" in response.status.message

    async def test_messages_of_two_topics_in_one_request_are_refused(self, caller):
        assert code_of(await caller.send(message("A"), message("B"))) == Code.MESSAGE_CORRUPTED
        assert code_of(await caller.send()) == Code.MESSAGE_CORRUPTED

    async def test_a_type_that_the_topic_does_not_accept_is_refused(self, cluster, caller):
        await create(cluster.peer(), version=500, attributes="+message.type=FIFO")
        response = await caller.send(message())
        assert code_of(response) == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert "NORMAL, but topic Orders accepts FIFO" in response.status.message
        assert code_of(await caller.send(message(message_group="g"))) == Code.OK

    async def test_what_the_broker_refuses_is_refused(self, start_cluster, connect):
        cluster = await start_cluster(**SETTINGS, autoCreateTopicEnable="false")
        response = await (await connect(cluster)).send(message())
        assert code_of(response) == Code.TOPIC_NOT_FOUND
        assert "Orders" in response.status.message

    async def test_without_a_client_id(self, cluster, caller):
        caller.metadata = []
        response = await caller.send(message())
        assert code_of(response) == Code.CLIENT_ID_REQUIRED


class TestTransactions:
    async def half(self, caller):
        sent = message(message_type=MessageType.TRANSACTION)
        (entry,) = (await caller.send(sent)).entries
        assert entry.status.code == Code.OK
        return entry

    async def end(self, caller, transaction_id, resolution, message_id="id-1"):
        request = M.EndTransactionRequest(
            topic=M.Resource(name="Orders"),
            message_id=message_id,
            transaction_id=transaction_id,
            resolution=resolution,
            source=TransactionSource.SOURCE_CLIENT,
        )
        return await caller.call("EndTransaction", request)

    async def test_a_committed_message_is_visible(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        entry = await self.half(caller)
        refused(await peer.pull(), 19, "")
        assert code_of(await self.end(caller, entry.transaction_id, TransactionResolution.COMMIT)) == Code.OK
        assert [each.body for each in records(await peer.pull())] == [b"body"]

    async def test_one_that_was_rolled_back_is_not(self, cluster, caller):
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        entry = await self.half(caller)
        assert (
            code_of(await self.end(caller, entry.transaction_id, TransactionResolution.ROLLBACK)) == Code.OK
        )
        refused(await peer.pull(), 19, "")
        assert code_of(await self.end(caller, entry.transaction_id, TransactionResolution.COMMIT)) != Code.OK

    async def test_it_can_be_ended_after_a_restart_of_the_broker(self, cluster, caller, connect):
        await create(cluster.peer(), "Orders", 1, 1)
        entry = await self.half(caller)
        await cluster.restart()
        later = await connect(cluster)
        assert code_of(await self.end(later, entry.transaction_id, TransactionResolution.COMMIT)) == Code.OK
        assert [each.body for each in records(await cluster.peer().pull())] == [b"body"]

    @pytest.mark.parametrize("text", ["", "x", "f" * 31, "g" * 32, "-" + "1" * 31, "0" * 32])
    async def test_an_invalid_id(self, cluster, caller, text):
        await create(cluster.peer())
        assert code_of(await self.end(caller, text, TransactionResolution.COMMIT)) != Code.OK

    async def test_the_message_of_another_transaction_is_not_committed(self, cluster, caller):
        await create(cluster.peer(), "Orders", 1, 1)
        entry = await self.half(caller)
        wrong = await self.end(caller, entry.transaction_id, TransactionResolution.COMMIT, message_id="id-2")
        assert code_of(wrong) != Code.OK

    async def test_the_broker_asks_the_producer(self, start_cluster, connect):
        cluster = await start_cluster(
            grpcPort="0", transactionTimeOut="0", transactionCheckInterval="1000000"
        )
        peer = cluster.peer()
        await create(peer, "Orders", 1, 1)
        caller = await connect(cluster)
        stream = caller.telemetry()
        await stream.write(producer_settings("Orders"))
        assert (await stream.read()).settings.publishing.max_body_size == 4 << 20
        assert code_of(await caller.heartbeat(kind=ClientType.PRODUCER)) == Code.OK
        await self.half(caller)
        await cluster.broker.parts.transactions.checks.round()
        asked = (await stream.read()).recover_orphaned_transaction_command
        assert (asked.message.body, asked.message.topic.name) == (b"body", "Orders")
        assert asked.message.system_properties.message_id == "id-1"
        await self.end(caller, asked.transaction_id, TransactionResolution.COMMIT)
        await until(lambda: cluster.broker.parts.store.max_offset("Orders", 0) == 1)
        stream.cancel()


async def test_the_groups_of_a_producer_are_its_topics(cluster, caller):
    stream = caller.telemetry()
    await stream.write(producer_settings("Orders", "Bills"))
    await stream.read()
    await caller.heartbeat(kind=ClientType.PRODUCER)
    assert set(cluster.broker.parts.producers.groups) == {"Orders", "Bills"}
    stream.cancel()


@pytest.mark.parametrize(("enabled", "host"), [("true", "203.0.113.7"), ("false", None)])
async def test_a_proxy_may_name_its_client_only_if_the_setting_allows_it(start_cluster, enabled, host):
    cluster = await start_cluster(**SETTINGS, grpcProxyProtocolEnable=enabled)
    line = b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 8081\r\n"
    async with connected(cluster.broker.endpoint.port, line) as peer:
        data = frame_message(M.QueryRouteRequest(topic=M.Resource(name="Orders")).SerializeToString())
        stream = peer.request(data, path=f"/{SERVICE}/QueryRoute", x_mq_client_id="client-1")
        peer.send()
        await (peer.response(stream) if host else peer.closed())
        assert [each.peer[0] for each in cluster.broker.endpoint.clients.connected] == (
            [host] if host else []
        )


async def test_requests_of_remoting_and_grpc_meet_in_one_topic(cluster, caller):
    peer = cluster.peer()
    await create(peer, "Orders", 1, 1)
    await peer.send(body=b"remoting")
    await caller.send(message(body=b"grpc"))
    assert {each.body for each in records(await peer.pull())} == {b"remoting", b"grpc"}


async def test_a_send_above_a_rate_limit_is_delayed_or_has_the_status_after_which_clients_wait(
    cluster, caller
):
    peer = cluster.peer()
    await create(peer, attributes="+rate.send.bytes=100")
    clock = stopped_clock(cluster)
    assert (await caller.send(message(body=bytes(310)))).status.code == Code.OK
    response = await caller.send(message(body=bytes(10)))
    assert response.status.code == response.entries[0].status.code == Code.TOO_MANY_REQUESTS
    assert response.status.message == (
        "rate limit of topic Orders: 100 bytes per second (rate.send.bytes), retry after 200 ms"
    )
    clock.advance(2.2)  # paid back, but for 0.1 s
    began = time.monotonic()
    assert (await caller.send(message(body=bytes(20)))).status.code == Code.OK
    assert time.monotonic() - began >= 0.05


async def test_a_receive_waits_until_its_group_may_receive_more(cluster, caller):
    peer = cluster.peer()
    await limit_group(peer, messages=10)
    for number in range(14):
        await caller.send(message(message_id=f"id-{number}"))
    began, count = time.monotonic(), 0
    while count < 14:
        count += len(await caller.receive(poll_s=20))
    assert time.monotonic() - began >= 0.3
