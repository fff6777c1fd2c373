"""Requests that a broker forwards to consumers."""

from __future__ import annotations

import json
import time

import pytest
from tests.kit.brokers import commit, create, queue, records, refused

from cometmq.protocol.bodies import (
    ConsumerConnection,
    GetConsumerStatusBody,
    ProducerConnection,
    ProducerTableInfo,
    ResetOffsetBody,
)
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    ConsumeMessageDirectlyRequestHeader,
    ConsumerGroupRequestHeader,
    GetConsumerRunningInfoRequestHeader,
    GetProducerConnectionListRequestHeader,
    GroupTopicRequestHeader,
    ResetOffsetRequestHeader,
)
from cometmq.protocol.properties.values import java_hash


class TestConsumersAreTold:
    async def reset(self, peer, timestamp, force=True, language="PYTHON", **more):
        header = ResetOffsetRequestHeader(
            topic="Orders", group="G", timestamp=timestamp, is_force=force, **more
        )
        return await peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, language=language)

    async def test_an_offset_reset_reaches_the_consumers(self, cluster, peer):
        await create(peer)
        await peer.send_numbers(3)
        await commit(peer, 0, 3)
        await commit(peer, 1, 0)
        assert (await self.reset(peer, 0)).code == 206
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        answer = await self.reset(peer, 0)
        assert answer.code == 0
        assert ResetOffsetBody.decode(answer.body).offset_table == {queue(0): 0, queue(1): 0}
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert told.ext == {"topic": "Orders", "group": "G", "timestamp": "0", "isForce": "true"}
        assert bytes(told.body).startswith(b'{"offsetTable":{{"brokerName":"broker-a"')
        await self.reset(peer, -1)
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert ResetOffsetBody.decode(told.body).offset_table == {queue(0): 3, queue(1): 0}
        await self.reset(peer, -1, language="CPP")
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert bytes(told.body).startswith(b'{"offsetTable":[{')

    async def test_a_time_behind_the_last_message_is_the_end_for_5x(self, cluster, peer):
        """For a time after the last message, 4.9 uses the last message's offset, and 5.x the queue's end."""
        await create(peer)
        await peer.send_numbers(3)
        await commit(peer, 0, 1)
        await commit(peer, 1, 0)
        await cluster.peer().heartbeat("c1")
        later = time.time_ns() // 1_000_000 + 60_000
        for version, offset in ((407, 2), (513, 3)):
            header = ResetOffsetRequestHeader(topic="Orders", group="G", timestamp=later, is_force=True)
            answer = await peer.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header, version=version)
            assert ResetOffsetBody.decode(answer.body).offset_table[queue(0)] == offset

    async def test_without_force_offsets_only_go_back(self, cluster, peer):
        await create(peer)
        await peer.send_numbers(3)
        await commit(peer, 0, 1)
        await commit(peer, 1, 0)
        await cluster.peer().heartbeat("c1")
        answer = await self.reset(peer, -1, force=False)
        assert ResetOffsetBody.decode(answer.body).offset_table == {queue(0): 1, queue(1): 0}

    @pytest.mark.parametrize(
        ("more", "offset"),
        [
            ({"queue_id": 0, "offset": 2}, 2),
            ({"queue_id": 0, "offset": 99}, 3),
            ({"queue_id": 0, "offset": -7}, 0),
            ({"queue_id": 0}, 3),
        ],
    )
    async def test_one_queue_alone(self, cluster, peer, more, offset):
        await create(peer)
        await peer.send_numbers(3)
        await commit(peer, 0, 1)  # the group has no offset for queue 1
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        answer = await self.reset(peer, -1, **more)
        assert ResetOffsetBody.decode(answer.body).offset_table == {queue(0): offset}
        told = await consumer.notice(RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        assert ResetOffsetBody.decode(told.body).offset_table == {queue(0): offset}

    async def test_a_queue_that_is_not_there(self, cluster, peer):
        await create(peer)
        await cluster.peer().heartbeat("c1")
        refused(await self.reset(peer, -1, queue_id=2, offset=0), 1, "queueId 2 must be between 0 and 1")

    async def test_resets_that_cannot_be(self, peer):
        assert (await self.reset(peer, 0)).code == 1
        await create(peer)
        answer = await self.reset(peer, 0)
        assert (answer.code, answer.remark) == (1, "THe consumer group <G> not exist")

    async def test_running_info_comes_from_the_client(self, cluster, peer):
        consumer = cluster.peer()
        header = GetConsumerRunningInfoRequestHeader(consumer_group="G", client_id="c1", jstack_enable=False)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 1
        await consumer.heartbeat("c1")
        consumer.answers[RequestCode.GET_CONSUMER_RUNNING_INFO] = lambda asked: asked.response(
            0, body=b'{"properties":{}}'
        )
        answer = await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        assert (answer.code, bytes(answer.body)) == (0, b'{"properties":{}}')
        asked = await consumer.notice(RequestCode.GET_CONSUMER_RUNNING_INFO)
        assert asked.ext == {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false"}

    async def test_old_clients_and_silent_clients(self, cluster, peer, monkeypatch):
        monkeypatch.setattr("cometmq.broker.admin.consumers.FORWARD_TIMEOUT_S", 0.2)
        header = GetConsumerRunningInfoRequestHeader(consumer_group="G", client_id="c1")
        consumer = cluster.peer()
        await consumer.heartbeat("c1", version=61)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 1
        await consumer.heartbeat("c1", version=409)
        assert (await peer.call(RequestCode.GET_CONSUMER_RUNNING_INFO, header)).code == 207

    async def test_direct_consumption_brings_the_record_along(self, cluster, peer):
        sent = await peer.send(body=b"once more")
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        consumer.answers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = lambda asked: asked.response(
            0, body=b'{"consumeResult":"CR_SUCCESS"}'
        )
        header = ConsumeMessageDirectlyRequestHeader(
            consumer_group="G", client_id="c1", msg_id=sent.ext["msgId"]
        )
        answer = await peer.call(RequestCode.CONSUME_MESSAGE_DIRECTLY, header)
        assert json.loads(bytes(answer.body)) == {"consumeResult": "CR_SUCCESS"}
        asked = await consumer.notice(RequestCode.CONSUME_MESSAGE_DIRECTLY)
        asked.code = 0
        assert [m.body for m in records(asked)] == [b"once more"]
        assert asked.ext["brokerName"] == "broker-a"

    async def test_how_far_the_consumers_are(self, cluster, peer):
        header = GroupTopicRequestHeader(topic="Orders", group="G")
        assert (await peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)).code == 1
        consumer = cluster.peer()
        await consumer.heartbeat("c1")
        said = GetConsumerStatusBody(message_queue_table={queue(0): 5})
        consumer.answers[RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT] = lambda asked: asked.response(
            0, body=said.encode()
        )
        answer = await peer.call(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)
        assert GetConsumerStatusBody.decode(answer.body).consumer_table == {"c1": {queue(0): 5}}


# -- What tools ask about the clients that are connected


class TestConnections:
    async def test_who_is_connected(self, peer):
        await peer.heartbeat("c1", topics={"Orders": "TagA"}, producers=("PG",), version=409)
        header = ConsumerGroupRequestHeader(consumer_group="G")
        body = ConsumerConnection.decode(
            (await peer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)).body
        )
        (client,) = body.connection_set
        assert (client.client_id, client.language, client.version) == ("c1", "PYTHON", 409)
        assert client.client_addr.startswith("127.0.0.1:")
        assert body.subscription_table["Orders"].code_set == [java_hash("TagA")]
        assert (body.consume_type, body.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
        header = GetProducerConnectionListRequestHeader(producer_group="PG")
        answer = await peer.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, header)
        assert [c.client_id for c in ProducerConnection.decode(answer.body).connection_set] == ["c1"]

    async def test_who_is_not(self, peer):
        header = ConsumerGroupRequestHeader(consumer_group="X")
        assert (await peer.call(RequestCode.GET_CONSUMER_CONNECTION_LIST, header)).code == 206
        header = GetProducerConnectionListRequestHeader(producer_group="X")
        assert (await peer.call(RequestCode.GET_PRODUCER_CONNECTION_LIST, header)).code == 1

    async def test_all_producers(self, peer):
        await peer.heartbeat("c1", None, producers=("P", "Q"))
        answer = await peer.call(RequestCode.GET_ALL_PRODUCER_INFO)
        data = ProducerTableInfo.decode(answer.body).data
        clients = {group: [info.client_id for info in infos] for group, infos in data.items()}
        assert clients == {"P": ["c1"], "Q": ["c1"]}
        assert data["P"][0].remote_ip.startswith("/127.0.0.1:")
