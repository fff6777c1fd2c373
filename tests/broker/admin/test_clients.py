"""What tools ask about the clients that are connected."""

from __future__ import annotations

from cometmq.protocol.bodies import ConsumerConnection, ProducerConnection, ProducerTableInfo
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.headers import (
    GetConsumerConnectionListRequestHeader,
    GetProducerConnectionListRequestHeader,
)
from cometmq.protocol.properties.values import java_hash


class TestConnections:
    async def test_who_is_connected(self, peer):
        await peer.heartbeat("c1", topics={"Orders": "TagA"}, producers=("PG",), version=409)
        header = GetConsumerConnectionListRequestHeader(consumer_group="G")
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
        header = GetConsumerConnectionListRequestHeader(consumer_group="X")
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
