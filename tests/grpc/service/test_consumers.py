"""Consumers of 5.x: receive, acknowledge, change leases, dead letters, renewals, and clients that vanish."""

from __future__ import annotations

import asyncio
import gzip

import grpc.aio
import pytest
from tests.grpc.service.caller import SETTINGS, consumer_settings, message
from tests.grpc.serving import M, connected
from tests.kit.brokers import create, store_raw
from tests.kit.waiting import until

from cometmq.broker.base.times import mono_ms
from cometmq.grpc.rpc.calls import frame_message
from cometmq.grpc.rpc.enums import ClientType, Code, Encoding, FilterType, Language, MessageType
from cometmq.grpc.rpc.messages import SERVICE
from cometmq.grpc.service import receives, renewals
from cometmq.grpc.service.clients import Client
from cometmq.grpc.service.delivered import popped_messages
from cometmq.protocol.pop import ReceiptHandle
from cometmq.protocol.properties.values import encode_properties
from cometmq.protocol.record.layout import HEAD_V4
from cometmq.store import Clock


def known(cluster):
    return cluster.broker.endpoint.clients.connected


def code_of(response):
    return response.status.code


@pytest.fixture
async def orders(cluster):
    await create(cluster.peer(), "Orders", 1, 1)
    return cluster


class TestReceive:
    async def test_a_message_with_all_of_its_parts(self, orders, caller):
        sent = message(tag="paid", keys=["k1", "k2"], message_group="g", trace_context="00-1")
        sent.body, sent.system_properties.body_encoding = gzip.compress(b"body"), Encoding.GZIP
        sent.user_properties["colour"] = "red"
        await caller.send(sent)
        (got,) = await caller.receive()
        system = got.system_properties
        assert (got.topic.name, got.body, dict(got.user_properties)) == (
            "Orders",
            sent.body,
            {"colour": "red"},
        )
        assert (system.message_id, system.tag, list(system.keys)) == ("id-1", "paid", ["k1", "k2"])
        assert (system.message_group, system.trace_context) == ("g", "00-1")
        assert (system.message_type, system.body_encoding) == (MessageType.FIFO, Encoding.GZIP)
        assert (system.queue_id, system.queue_offset, system.delivery_attempt) == (0, 0, 1)
        assert system.invisible_duration.ToSeconds() == 30
        assert ReceiptHandle.decode(system.receipt_handle).commit_log_offset is not None

    async def test_an_acknowledged_message_does_not_come_again(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        acked = await caller.ack(got)
        assert code_of(acked) == Code.OK
        assert [entry.status.code for entry in acked.entries] == [Code.OK]
        assert orders.broker.parts.tables.offsets.query("G", "Orders", 0) == 1
        again = await caller.ack(got)
        assert code_of(again) == Code.INVALID_RECEIPT_HANDLE

    async def test_values_that_no_response_can_hold_do_not_stop_a_receive(self, orders, caller):
        await orders.peer().send(born_timestamp=2**62, reconsume_times=2**31 - 1)
        (got,) = await caller.receive()
        assert got.system_properties.delivery_attempt == 2**31 - 1
        assert got.system_properties.born_timestamp.ToDatetime().year == 9999

    @pytest.mark.parametrize(
        ("at", "damage", "left"),
        [(0, b"X", ["1", "3"]), (-4, b"\x7f", ["1", "3"]), (-HEAD_V4.size, b"\x7f", ["1"])],
        ids=["body", "length of the body", "length of the record"],
    )
    async def test_a_damaged_message_does_not_stop_a_receive(
        self, orders, caller, at, damage, left, monkeypatch, caplog
    ):
        def damaged(response, *given):
            at_body = bytes(response.body).index(b"body 2") + at
            response.body = response.body[:at_body] + damage + response.body[at_body + 1 :]
            return popped_messages(response, *given)

        monkeypatch.setattr(receives, "popped_messages", damaged)
        for body in (b"1", b"body 2", b"3"):
            await caller.send(message(body=body))
        assert [got.body.decode() for got in await caller.receive()] == left
        assert "damaged" in caplog.text

    @pytest.mark.parametrize(
        "forged", ["garbage", "0 1 60000 0 0 broker-a 0 1", "0 1 60000 0 1 broker-a 0 1"]
    )
    async def test_a_producer_cannot_forge_the_handle_of_a_message(self, orders, caller, forged):
        """With the handle of another message, an acknowledgement would end that message."""
        store_raw(orders, "Orders", encode_properties({"POP_CK": forged}), b"1")  # Sends drop the property
        await orders.peer().send(body=b"2")
        (first,) = await caller.receive(count=1)
        assert code_of(await caller.ack(first)) == Code.OK
        (second,) = await caller.receive(count=1)
        assert (first.body, second.body) == (b"1", b"2")

    async def test_receives_of_one_client_are_limited(self, orders, caller, monkeypatch):
        monkeypatch.setattr(receives, "MAX_POLLS", 1)
        waiting = asyncio.create_task(caller.receive(poll_s=20))
        await until(lambda: len(orders.broker.parts.pops.pops.polls))
        (answer,) = [each async for each in caller.receiving(caller.receive_request())]
        assert answer.status.code == Code.TOO_MANY_REQUESTS
        await caller.send(message())
        assert len(await waiting) == 1
        await caller.send(message(message_id="id-2"))
        assert len(await caller.receive(poll_s=20)) == 1

    async def test_a_leased_message_is_not_delivered_to_others(self, orders, caller, connect):
        await caller.send(message())
        assert len(await caller.receive()) == 1
        other = await connect(orders, "client-2")
        assert await other.receive() == []
        assert len(await other.receive(group="Other")) == 1

    async def test_a_long_poll_ends_when_a_message_arrives(self, orders, caller, connect):
        waiting = asyncio.create_task(caller.receive(poll_s=20))
        await until(lambda: len(orders.broker.parts.pops.pops.polls))
        await (await connect(orders, "client-2")).send(message())
        assert [each.body for each in await waiting] == [b"body"]

    async def test_a_call_that_was_cancelled_waits_no_longer(self, orders, caller):
        call = caller.receiving(caller.receive_request(poll_s=20))
        reading = asyncio.create_task(call.read())
        polls = orders.broker.parts.pops.pops.polls
        await until(lambda: len(polls))
        (client,) = orders.broker.endpoint.clients.connected
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        await until(lambda: not len(polls) and not client.polls)
        assert (await caller.send(message())).status.code == Code.OK
        (got,) = await caller.receive()
        assert got.system_properties.delivery_attempt == 1

    async def test_a_message_of_a_call_that_was_cancelled_comes_at_once_and_first(
        self, orders, caller, connect, monkeypatch
    ):
        monkeypatch.setattr(Client, "withdraw", lambda *_: None)
        request = caller.receive_request(poll_s=20)
        call = caller.receiving(request)
        reading = asyncio.create_task(call.read())
        await until(lambda: len(orders.broker.parts.pops.pops.polls))
        call.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await reading
        sender = await connect(orders, "client-2")
        await sender.send(message())
        (got,) = await sender.receive(poll_s=20)
        assert got.system_properties.delivery_attempt == 1

    @pytest.mark.parametrize("ends_by", ["reset", "deadline", "connection"])
    async def test_messages_that_their_client_has_not_taken_come_again_at_once(
        self, orders, caller, connect, ends_by
    ):
        """Otherwise their leases would be renewed for hours, as their client lives."""
        await (await connect(orders, "sender")).send(message(body=bytes(100_000)))
        await caller.heartbeat("G")  # The client remains, as it has another connection
        request = frame_message(caller.receive_request(auto_renew=True).SerializeToString())
        deadline = {"grpc_timeout": "60S"} if ends_by == "deadline" else {}
        async with connected(orders.broker.endpoint.port) as peer:
            peer.reads_data = False
            path = f"/{SERVICE}/ReceiveMessage"
            stream = peer.request(request, path=path, x_mq_client_id="client-1", **deadline)
            peer.send()
            (client,) = (each for each in known(orders) if each.client_id == "client-1")
            await until(lambda: client.leased)
            if ends_by == "reset":
                peer.http.reset_stream(stream, 8)
                peer.send()
            elif ends_by == "connection":
                peer.writer.transport.abort()
            else:
                for connection in client.connections:
                    connection.calls.expire(asyncio.get_running_loop().time() + 60, 30, 1)
            (got,) = await (await connect(orders, "client-2")).receive(poll_s=20)
            assert (len(got.body), got.system_properties.delivery_attempt) == (100_000, 1)
            assert not client.leased

    @pytest.mark.parametrize(
        ("kind", "text", "found"),
        [
            (FilterType.TAG, "paid", ["id-1"]),
            (FilterType.SQL, "amount > 5", ["id-2"]),
            (FilterType.TAG, "*", ["id-1", "id-2"]),
        ],
    )
    async def test_a_filter(self, orders, caller, kind, text, found):
        await caller.send(message(tag="paid"))
        other = message(message_id="id-2", tag="open")
        other.user_properties["amount"] = "7"
        await caller.send(other)
        expression = M.FilterExpression(type=kind, expression=text)
        got = await caller.receive(expression=expression)
        assert sorted(each.system_properties.message_id for each in got) == found

    async def test_a_tag_with_the_same_hash_is_acknowledged_and_not_delivered(self, orders, caller):
        await caller.send(message(tag="BB"))
        await caller.send(message(message_id="id-2", tag="Aa"))
        expression = M.FilterExpression(type=FilterType.TAG, expression="x || Aa")
        (got,) = await caller.receive(expression=expression)
        assert got.system_properties.message_id == "id-2"
        assert orders.broker.parts.tables.offsets.query("G", "Orders", 0) == 1
        await caller.ack(got)
        await caller.send(message(message_id="id-3", tag="BB"))
        assert await caller.receive(expression=expression) == []
        assert orders.broker.parts.tables.offsets.query("G", "Orders", 0) == 3

    @pytest.mark.parametrize("seconds", [9.999, 12 * 3600 + 1])
    async def test_a_lease_is_neither_too_short_nor_too_long(self, orders, caller, seconds):
        request = caller.receive_request(invisible_s=seconds)
        (answer,) = [each async for each in caller.receiving(request)]
        assert answer.status.code == Code.ILLEGAL_INVISIBLE_TIME

    async def test_an_unknown_topic(self, start_cluster, connect):
        cluster = await start_cluster(**SETTINGS)
        caller = await connect(cluster)
        (answer,) = [each async for each in caller.receiving(caller.receive_request("Nowhere"))]
        assert answer.status.code == Code.TOPIC_NOT_FOUND

    async def test_an_invalid_sql_filter(self, orders, caller):
        expression = M.FilterExpression(type=FilterType.SQL, expression="a >")
        (answer,) = [each async for each in caller.receiving(caller.receive_request(expression=expression))]
        assert answer.status.code == Code.ILLEGAL_FILTER_EXPRESSION


class TestLeases:
    async def test_the_handle_stays_valid_when_the_lease_changes(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        changed = await caller.change(got, 60)
        assert (code_of(changed), changed.receipt_handle) == (Code.OK, got.system_properties.receipt_handle)
        assert code_of(await caller.ack(got)) == Code.OK

    async def test_a_message_that_is_given_back_comes_again_with_a_higher_count(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        assert code_of(await caller.change(got, 0)) == Code.OK
        (again,) = await caller.receive(poll_s=20)
        assert (again.topic.name, again.system_properties.delivery_attempt) == ("Orders", 2)
        assert code_of(await caller.ack(again)) == Code.OK

    @pytest.mark.parametrize("handle", ["", "x", "0 0 0 0 0 broker-a 0 0 0", "1 2 3 4 5 6 7 8 9", "0 " * 600])
    async def test_an_invalid_handle(self, orders, caller, handle):
        await caller.send(message())
        (got,) = await caller.receive()
        got.system_properties.receipt_handle = handle
        assert code_of(await caller.ack(got)) == Code.INVALID_RECEIPT_HANDLE
        assert code_of(await caller.change(got, 60)) == Code.INVALID_RECEIPT_HANDLE

    async def test_a_lease_ends_with_its_topic(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        await orders.peer().delete_topic("Orders")
        assert code_of(await caller.ack(got)) == Code.INVALID_RECEIPT_HANDLE
        assert code_of(await caller.change(got, 60)) == Code.INVALID_RECEIPT_HANDLE

    async def test_a_handle_of_another_broker_is_refused(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        system = got.system_properties
        system.receipt_handle = system.receipt_handle.replace("broker-a", "broker-b")
        assert code_of(await caller.ack(got)) == Code.INVALID_RECEIPT_HANDLE
        assert code_of(await caller.change(got, 60)) == Code.INVALID_RECEIPT_HANDLE

    @pytest.mark.parametrize("name", ["", "a b", "x" * 300])
    async def test_invalid_names(self, orders, caller, name):
        await caller.send(message())
        (got,) = await caller.receive()
        assert (await caller.ack(got, group=name)).entries[0].status.code == Code.ILLEGAL_CONSUMER_GROUP
        (answer,) = [each async for each in caller.receiving(caller.receive_request(group=name))]
        assert answer.status.code == Code.ILLEGAL_CONSUMER_GROUP
        (answer,) = [each async for each in caller.receiving(caller.receive_request(topic=name))]
        assert answer.status.code == Code.ILLEGAL_TOPIC

    async def test_renewals_of_many_leases_leave_room_for_other_tasks(self, orders, caller):
        await caller.send(*(message(message_id=f"id-{number}") for number in range(32)))
        got = await caller.receive(auto_renew=True)
        endpoint = orders.broker.endpoint
        (client,) = endpoint.clients.connected
        lease = next(iter(client.leased.values()))
        handles = [lease.handle._replace(offset=100 + number) for number in range(10_000)]
        for handle in handles:
            renewals.keep(client, lease._replace(handle=handle))
        turns = 0
        renewing = asyncio.create_task(endpoint.renewals.renew_all(asyncio.get_running_loop().time()))
        while not renewing.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 100
        assert len(client.leased) == len(got) == 32  # The others have ended

    async def test_leases_of_a_silent_client_are_not_renewed(self, orders, caller):
        await caller.send(message())
        await caller.receive(auto_renew=True)
        endpoint, leases = orders.broker.endpoint, orders.broker.parts.pops.leases
        (client,) = endpoint.clients.connected
        (lease,) = leases.find(("G", "Orders", 0)).leases.values()
        before = lease.deadline_ms
        await endpoint.renewals.renew_all(client.seen + renewals.SILENT_S + 1)
        assert (lease.deadline_ms, len(client.leased)) == (before, 1)
        await caller.heartbeat("G")
        await until(lambda: asyncio.get_running_loop().time() * 1000 > before - renewals.RENEWED_MS + 2)
        await endpoint.renewals.renew_all(client.seen)
        assert lease.deadline_ms > before
        await endpoint.renewals.renew_all(client.seen + renewals.SILENT_S + renewals.RENEWED_MS / 1000 + 1)
        assert not client.leased

    async def test_a_dead_letter(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive()
        assert code_of(await caller.dead_letter(got)) == Code.OK
        assert orders.broker.parts.store.max_offset("%DLQ%G", 0) == 1
        assert code_of(await caller.ack(got)) == Code.INVALID_RECEIPT_HANDLE

    async def test_an_ordered_message_that_fails_too_often_becomes_a_dead_letter(self, orders, caller):
        peer, offsets = orders.peer(), orders.broker.parts.tables.offsets
        await peer.set_group(b'{"groupName":"G","consumeMessageOrderly":true,"retryMaxTimes":1}')
        await caller.send(message())
        await caller.send(message(message_id="id-2"))
        for attempt in (1, 2):
            (got,) = await caller.receive(count=1, poll_s=20)
            assert got.system_properties.delivery_attempt == attempt
            await caller.change(got, 0)
        await until(lambda: not len(orders.broker.parts.pops.leases))
        assert await caller.receive(count=1) == []
        await until(lambda: offsets.query("G", "Orders", 0) == 1)
        assert orders.broker.parts.store.max_offset("%DLQ%G", 0) == 1
        (got,) = await caller.receive(count=1, poll_s=20)
        assert got.system_properties.message_id == "id-2"

    async def test_a_consumer_that_hangs_loses_its_message_after_the_delay_of_the_policy(
        self, orders, caller, monkeypatch
    ):
        await orders.peer().set_group(
            b'{"groupName":"G","groupRetryPolicy":{"type":"CUSTOMIZED","customizedRetryPolicy":{"next":[1]}}}'
        )
        await caller.send(message())
        assert len(await caller.receive(auto_renew=True)) == 1
        monkeypatch.setattr(renewals, "LONGEST_S", -1.0)
        await orders.broker.endpoint.renewals.renew_all(asyncio.get_running_loop().time())
        (got,) = await caller.receive(poll_s=20)
        assert got.system_properties.delivery_attempt == 2

    async def test_a_lease_of_a_push_consumer_is_renewed_while_it_is_connected(self, orders, caller, connect):
        await caller.send(message())
        push = await connect(orders, "client-2")
        (held,) = await push.receive(auto_renew=True, invisible_s=None)
        clients = orders.broker.endpoint.clients
        (client,) = [each for each in clients.connected if each.client_id == "client-2"]
        assert len(client.leased) == 1
        await orders.broker.endpoint.renewals.renew_all(asyncio.get_running_loop().time())
        assert await caller.receive() == []
        place = "G", "Orders", held.system_properties.queue_id
        queue = orders.broker.parts.pops.leases.find(place)
        (lease,) = queue.leases.values()
        renewed_until_ms = lease.deadline_ms
        await push.channel.channel.close()
        await until(lambda: lease.deadline_ms < renewed_until_ms)
        assert lease.deadline_ms <= mono_ms(Clock()) + 500
        (got,) = await caller.receive(poll_s=20)
        assert got.body == b"body"

    async def test_a_renewal_ends_with_the_ack(self, orders, caller):
        await caller.send(message())
        (got,) = await caller.receive(auto_renew=True)
        (client,) = orders.broker.endpoint.clients.connected
        assert client.leased
        await caller.ack(got)
        assert not client.leased


class TestSessions:
    async def test_settings_of_a_consumer_are_merged(self, orders, caller):
        peer = orders.peer()
        await peer.set_group(b'{"groupName":"G","consumeMessageOrderly":true,"retryMaxTimes":3}')
        stream = caller.telemetry()
        await stream.write(consumer_settings())
        answer = await stream.read()
        assert code_of(answer) == Code.OK
        settings = answer.settings
        assert settings.subscription.fifo
        assert settings.backoff_policy.max_attempts == 4
        delays = [each.ToSeconds() for each in settings.backoff_policy.customized_backoff.next]
        assert (len(delays), delays[:4], delays[-1]) == (18, [1, 5, 10, 30], 7200)
        assert not settings.HasField("metric")
        stream.cancel()

    async def test_a_consumer_in_node_gets_the_only_retry_policy_that_it_knows(self, orders, caller):
        await orders.peer().set_group(b'{"groupName":"G","retryMaxTimes":3}')
        stream, settings = caller.telemetry(), consumer_settings()
        settings.settings.user_agent.language = Language.NODE_JS
        await stream.write(settings)
        policy = (await stream.read()).settings.backoff_policy
        assert policy.max_attempts == 4
        assert policy.exponential_backoff.initial.ToSeconds() == 1
        stream.cancel()

    async def test_delays_that_grow_replace_those_that_a_client_has_announced(self, orders, caller):
        await orders.peer().set_group(
            b'{"groupName":"G","retryMaxTimes":2147483647,'
            b'"groupRetryPolicy":{"type":"EXPONENTIAL","exponentialRetryPolicy":{"initial":9}}}'
        )
        stream, settings = caller.telemetry(), consumer_settings()
        settings.settings.backoff_policy.customized_backoff.next.add().FromSeconds(9)
        await stream.write(settings)
        policy = (await stream.read()).settings.backoff_policy
        backoff = policy.exponential_backoff
        assert policy.max_attempts == 2**31 - 1
        assert (backoff.initial.ToMilliseconds(), backoff.max.ToSeconds(), backoff.multiplier) == (9, 7200, 2)
        stream.cancel()

    async def test_a_heartbeat_without_settings_registers_the_group(self, orders, caller):
        assert code_of(await caller.heartbeat("G")) == Code.OK
        members = orders.broker.parts.consumers.groups["G"]
        assert members.client_ids() == ["client-1"]

    async def test_a_client_that_reports_its_end_is_forgotten(self, orders, caller):
        await caller.heartbeat("G")
        answer = await caller.call("NotifyClientTermination", M.NotifyClientTerminationRequest())
        assert code_of(answer) == Code.OK
        await until(lambda: "G" not in orders.broker.parts.consumers.groups)
        assert not orders.broker.endpoint.clients.connected

    async def test_all_telemetry_streams_of_a_client_that_reports_its_end_are_closed(self, orders, caller):
        streams = [caller.telemetry() for _ in range(3)]
        for stream in streams[:2]:
            await stream.write(consumer_settings())
            assert (await stream.read()).status.code == Code.OK
        (client,) = orders.broker.endpoint.clients.connected
        await until(lambda: len(client.streams) == 3)
        await caller.call("NotifyClientTermination", M.NotifyClientTerminationRequest())
        for stream in streams:
            assert await stream.read() is grpc.aio.EOF

    async def test_a_client_whose_connection_closes_is_forgotten(self, orders, caller):
        await caller.heartbeat("G")
        await caller.channel.channel.close()
        await until(lambda: "G" not in orders.broker.parts.consumers.groups)

    async def test_telemetry_without_a_client_id(self, orders, caller):
        caller.metadata = []
        stream = caller.telemetry()
        assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("kind", [ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER])
    async def test_after_a_restart_a_client_goes_on_without_new_settings(self, orders, caller, connect, kind):
        await caller.send(message())
        await orders.restart()
        later = await connect(orders)
        assert code_of(await later.heartbeat("G", kind)) == Code.OK
        assert len(await later.receive()) == 1
