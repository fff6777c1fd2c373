"""Which hosts are asked for the message of an id."""

from __future__ import annotations

import pytest
from tests.client.fakes import FakeBroker

from cometmq import BrokerError, Message, MessageNotFound, Producer
from cometmq.protocol.bodies import ClusterInfo
from cometmq.protocol.ids import offset_id_of
from cometmq.testing import LocalBroker


async def test_the_message_of_an_offset_id_is_found_without_a_route(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        sent = await producer.send(Message("Ids", b"x"))
    async with Producer("p", namesrv=local.namesrv) as fresh:
        assert (await fresh.view_message(sent.offset_msg_id)).body == b"x"


async def test_a_host_that_is_no_broker_of_the_cluster_is_not_asked(
    local: LocalBroker, broker: FakeBroker
) -> None:
    msg_id = offset_id_of(broker.addr, 900)
    async with Producer("p", namesrv=local.namesrv) as producer:
        await producer.queues("Ids")
        with pytest.raises(MessageNotFound, match=rf"{broker.addr}, .* is no broker of this cluster"):
            await producer.view_message(msg_id)
    assert broker.connections == []


async def test_a_broker_is_known_by_the_name_of_its_host_too(
    local: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, where the name is registered, and ids hold the IP address."""
    async with Producer("p", namesrv=local.namesrv) as producer:
        sent = await producer.send(Message("Ids", b"x"))
    async with Producer("p", namesrv=local.namesrv) as fresh:
        info = await fresh.client.namesrv.cluster_info()
        (data,) = info.broker_addr_table.values()
        data.broker_addrs[0] = data.broker_addrs[0].replace("127.0.0.1", "localhost")

        async def cluster_info() -> ClusterInfo:
            return info

        monkeypatch.setattr(fresh.client.namesrv, "cluster_info", cluster_info)
        assert (await fresh.view_message(sent.offset_msg_id)).body == b"x"


async def test_what_a_broker_of_the_cluster_says_is_the_answer(local: LocalBroker) -> None:
    async with Producer("p", namesrv=local.namesrv) as producer:
        with pytest.raises(BrokerError):
            await producer.view_message(offset_id_of(local.broker_addr, 2**40))
