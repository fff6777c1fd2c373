"""Clients by id and account: several connections, limits, silence, and replies to settings."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tests.grpc.service.caller import SETTINGS, Caller, consumer_settings, message, producer_settings
from tests.grpc.service.test_access import MOMENT, signed
from tests.grpc.service.test_access import guarded as guarded  # a fixture
from tests.grpc.serving import M, connected
from tests.kit.brokers import create
from tests.kit.waiting import until

from cometmq.errors import SendFailed
from cometmq.grpc.rpc.calls import frame_message
from cometmq.grpc.rpc.enums import ClientType, Code
from cometmq.grpc.rpc.messages import SERVICE
from cometmq.grpc.service import clients, sessions
from cometmq.remoting import Connection


@pytest.fixture
async def orders(cluster):
    await create(cluster.peer(), "Orders", 1, 1)
    return cluster


def known(cluster):
    return {each.client_id: each for each in cluster.broker.endpoint.clients.connected}


async def terminate(caller):
    return await caller.call("NotifyClientTermination", M.NotifyClientTerminationRequest())


class TestConnections:
    async def test_a_lease_follows_its_client_to_another_connection(self, orders, caller, connect):
        await caller.send(message())
        (got,) = await caller.receive(auto_renew=True)
        other = await connect(orders)
        (client,) = known(orders).values()
        assert len(client.leased) == 1
        assert (await other.ack(got)).status.code == Code.OK
        assert not client.leased

    async def test_a_client_ends_with_its_last_connection(self, orders, caller, connect):
        other = await connect(orders)
        await caller.heartbeat("G")
        await other.heartbeat("G")
        client = known(orders)["client-1"]
        await caller.channel.channel.close()
        await until(lambda: len(client.connections) == 1)
        assert "G" in orders.broker.parts.consumers.groups
        await other.channel.channel.close()
        await until(lambda: not known(orders))
        await until(lambda: "G" not in orders.broker.parts.consumers.groups)

    async def test_without_a_link_each_entry_of_an_ack_has_a_status(self, orders, caller, monkeypatch):
        await caller.send(message())
        (got,) = await caller.receive()

        def ask(*_args: object) -> None:
            raise SendFailed("broker")

        monkeypatch.setattr(Connection, "ask", ask)
        response = await caller.ack(got)
        assert [each.status.code for each in response.entries] == [Code.INTERNAL_SERVER_ERROR]

    async def test_clients_of_one_connection_end_alone(self, orders, caller):
        second = Caller(caller.channel, "client-2")
        await caller.heartbeat("G")
        await second.heartbeat("G")
        await terminate(caller)
        assert list(known(orders)) == ["client-2"]
        await second.channel.channel.close()
        await until(lambda: not known(orders))

    async def test_one_id_with_two_accounts_is_two_clients(self, guarded, connect):
        mine = {"x_mq_date_time": MOMENT, "authorization": signed()}
        caller = await connect(guarded, **mine)
        await caller.send(message())
        (got,) = await caller.receive(auto_renew=True)
        theirs = {**mine, "authorization": signed("secret-of-reader", "reader-1")}
        stranger = await connect(guarded, **theirs)
        assert (await terminate(stranger)).status.code == Code.OK
        (client,) = known(guarded).values()
        assert len(client.leased) == 1
        assert (await stranger.ack(got)).entries[0].status.code == Code.FORBIDDEN

    @pytest.mark.parametrize("limit", ["MAX_CLIENTS", "MAX_CLIENTS_PER_CONNECTION"])
    async def test_their_number_is_limited(self, orders, caller, monkeypatch, limit):
        monkeypatch.setattr(clients, limit, 1)
        await caller.heartbeat("G")
        refused = await Caller(caller.channel, "client-2").heartbeat("G")
        assert refused.status.code == Code.TOO_MANY_REQUESTS
        assert "1 clients already" in refused.status.message
        await terminate(caller)
        assert (await Caller(caller.channel, "client-2").heartbeat("G")).status.code == Code.OK

    async def test_those_of_one_host_do_not_shut_others_out(self, start_cluster, connect, monkeypatch):
        monkeypatch.setattr(clients, "MAX_CLIENTS", 3)
        cluster = await start_cluster(**SETTINGS, grpcProxyProtocolEnable="true")
        data = frame_message(M.SendMessageRequest(messages=[message()]).SerializeToString())

        async def send(stranger, number: int) -> int:
            stream = stranger.request(data, x_mq_client_id=f"s{number}")
            stranger.send()
            _, response = await stranger.response(stream)
            return M.SendMessageResponse.FromString(response[5:]).status.code

        line = b"PROXY TCP4 203.0.113.7 192.0.2.1 4711 8081\r\n"
        async with connected(cluster.broker.endpoint.port, line) as stranger:
            codes = [await send(stranger, number) for number in range(4)]
            assert codes == [Code.OK] * 3 + [Code.TOO_MANY_REQUESTS]
            caller = await connect(cluster)
            assert (await caller.heartbeat("G")).status.code == Code.OK
            assert sorted(known(cluster)) == ["client-1", "s0", "s1"]
            assert await send(stranger, 4) == Code.TOO_MANY_REQUESTS
            assert await send(stranger, 0) == Code.OK
            assert (
                await Caller(caller.channel, "client-2").heartbeat("G")
            ).status.code == Code.TOO_MANY_REQUESTS


class TestEnds:
    async def test_its_end_ends_its_receives_without_an_error(self, orders, caller):
        waiting = asyncio.create_task(caller.receive(poll_s=20))
        await until(lambda: len(orders.broker.parts.pops.pops.polls))
        await terminate(caller)
        assert await waiting == []

    @pytest.mark.parametrize("auto_renew", [True, False])
    @pytest.mark.parametrize("is_reported", [True, False])
    async def test_messages_that_were_on_their_way_to_it_come_again_at_once(
        self, orders, caller, connect, auto_renew, is_reported
    ):
        pops, endpoint = orders.broker.parts.pops.pops, orders.broker.endpoint
        request = caller.receive_request(poll_s=20, auto_renew=auto_renew)
        reading = asyncio.create_task(caller.receiving(request).read())
        await until(lambda: len(pops.polls))
        (client,) = known(orders).values()
        (connection,) = client.connections
        (call,) = connection.calls._open.values()  # noqa: SLF001

        def end_before_the_response_arrives():
            if is_reported:
                endpoint.sessions.notify_client_termination(call, None)
            else:
                connection.abort()

        def leased():
            del pops.expiry.arm
            pops.expiry.arm()
            asyncio.get_running_loop().call_soon(end_before_the_response_arrives)

        pops.expiry.arm = leased
        await orders.peer().send()
        await until(lambda: client.ended)
        (got,) = await (await connect(orders, "client-2")).receive(poll_s=20)
        assert got.system_properties.delivery_attempt == 1
        await until(lambda: not orders.broker.parts.consumers.groups)
        reading.cancel()

    async def test_a_silent_client_without_a_telemetry_stream_is_forgotten(self, orders, caller, connect):
        stream = caller.telemetry()
        await stream.write(consumer_settings())
        await stream.read()
        other = await connect(orders, "client-2")
        await other.heartbeat("G")
        endpoint = orders.broker.endpoint
        endpoint.sessions.expire(known(orders)["client-2"].seen + clients.EXPIRED_S)
        assert set(known(orders)) == {"client-1", "client-2"}
        endpoint.sessions.expire(known(orders)["client-2"].seen + clients.EXPIRED_S + 1)
        assert set(known(orders)) == {"client-1"}
        assert (await other.heartbeat("G")).status.code == Code.OK
        stream.cancel()
        await until(lambda: known(orders)["client-1"].telemetry is None)


class TestSettings:
    async def test_settings_register_the_client_at_once(self, orders, caller, connect):
        stream = caller.telemetry()
        await stream.write(consumer_settings())
        await stream.read()
        group = await until(lambda: orders.broker.parts.consumers.groups.get("G"))
        assert (group.client_ids(), list(group.subscriptions)) == (["client-1"], ["Orders"])
        producer = (await connect(orders, "client-2")).telemetry()
        await producer.write(producer_settings("Orders"))
        await producer.read()
        await until(lambda: "Orders" in orders.broker.parts.producers.groups)
        stream.cancel()
        producer.cancel()

    async def test_topics_are_kept_up_to_a_size(self, orders, caller, monkeypatch):
        monkeypatch.setattr(sessions, "MAX_KEPT_BYTES", 40)
        stream = caller.telemetry()
        await stream.write(producer_settings(*(f"Topic-{number}" for number in range(1_000))))
        assert len((await stream.read()).settings.publishing.topics) == 1_000
        assert len(known(orders)["client-1"].settings) < 60
        await caller.heartbeat(kind=ClientType.PRODUCER)
        assert list(orders.broker.parts.producers.groups) == ["Topic-0", "Topic-1", "Topic-2"]
        stream.cancel()

    @pytest.mark.parametrize("make", [producer_settings, lambda *topics: subscriptions(*topics)])
    async def test_too_many_topics_are_refused(self, orders, caller, make):
        stream = caller.telemetry()
        await stream.write(make(*(f"T{number}" for number in range(1_001))))
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "1001 topics" in await stream.details()

    async def test_a_client_that_sends_them_too_often_loses_its_stream(self, orders, caller, monkeypatch):
        """Otherwise 16 KiB of tiny settings would block the event loop for 100 ms, again and again."""
        monkeypatch.setattr(clients, "SETTINGS_AT_ONCE", 2)
        monkeypatch.setattr(clients, "SETTINGS_PER_S", 0)
        stream = caller.telemetry()
        for _ in range(2):
            await stream.write(producer_settings("Orders"))
            await stream.read()
        await stream.write(producer_settings("Orders"))
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert known(orders)["client-1"].telemetry is None

    async def test_the_newest_reply_arrives_even_if_the_stream_was_full(self, orders, monkeypatch):
        monkeypatch.setattr(clients, "REPLY_RETRY_S", 0.01)
        names = [f"{'T' * 100}-{number}" for number in range(100)]
        async with connected(orders.broker.endpoint.port) as peer:
            peer.reads_data = False
            stream = peer.request(path=f"/{SERVICE}/Telemetry", end=False, x_mq_client_id="client-1")
            for number in range(20):
                data = frame_message(producer_settings(*names, f"Last-{number}").SerializeToString())
                while peer.http.local_flow_control_window(stream) < len(data):
                    await peer.read()
                peer.http.send_data(stream, data)
                peer.send()
            await until(lambda: known(orders) and b"Last-19" in known(orders)["client-1"].settings)
            assert known(orders)["client-1"].telemetry.unsent < 2 * clients.MAX_TELEMETRY_BYTES
            peer.http.increment_flow_control_window(1 << 20)
            peer.http.increment_flow_control_window(1 << 20, stream)
            peer.send()
            while not any(b"Last-19" in getattr(event, "data", b"") for event in peer.events):
                assert await peer.read()


def subscriptions(*topics):
    settings = consumer_settings()
    for topic in topics[1:]:
        settings.settings.subscription.subscriptions.add().topic.name = topic
    return settings


async def test_the_first_receives_of_an_ordered_group_are_ordered_without_settings(orders, caller, connect):
    await orders.peer().set_group(b'{"groupName":"G","consumeMessageOrderly":true}')
    for number in range(3):
        await caller.send(message(message_id=f"id-{number}", message_group="g"))
    (got,) = await caller.receive()
    other = await connect(orders, "client-2")
    assert await other.receive() == []
    await caller.ack(got)
    stream = other.telemetry()
    await stream.write(consumer_settings())
    assert (await stream.read()).settings.subscription.fifo
    assert len(await other.receive()) == 2
    stream.cancel()


async def test_members_of_4_x_and_5_x_keep_their_subscriptions(orders, caller):
    peer = orders.peer()
    stream = caller.telemetry()
    await stream.write(consumer_settings())
    await stream.read()
    for _ in range(2):
        await peer.heartbeat("old", topics={"Bills": "*", "%RETRY%G": "*"})
        await caller.heartbeat("G")
        assert orders.broker.parts.consumers.topics_of("G") == {"Orders", "Bills", "%RETRY%G"}
    stream.cancel()


async def test_a_sender_of_a_transaction_is_asked_though_it_has_sent_no_settings(start_cluster, connect):
    cluster = await start_cluster(**SETTINGS, transactionTimeOut="0", transactionCheckInterval="1000000")
    await create(cluster.peer(), "Orders", 1, 1)
    caller = await connect(cluster)
    await caller.send(message(message_type=4))
    await cluster.restart()
    later = await connect(cluster)
    await later.heartbeat(kind=ClientType.PRODUCER)
    await later.send(message(message_id="id-2", message_type=4))
    assert list(cluster.broker.parts.producers.groups) == ["Orders"]
    assert (await later.heartbeat(kind=ClientType.PRODUCER)).status.code == Code.OK
