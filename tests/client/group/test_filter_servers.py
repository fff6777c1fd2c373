"""Selection of the filter server that receives a consumer's filter class and its pulls."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.client.fakes import Box
from tests.kit.fakes import FakeBroker, FakeNamesrv

from cometmq import (
    BrokerError,
    ConsumeFromWhere,
    NoRouteError,
    PullConsumer,
    PushConsumer,
    PushOptions,
    filter_class,
)
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.headers import RegisterMessageFilterClassRequestHeader

WANTED = filter_class("Wanted", "class Wanted: ...\n")
UPLOAD, PULL = RequestCode.REGISTER_MESSAGE_FILTER_CLASS, RequestCode.PULL_MESSAGE


class FilterServers:
    """Two filter servers in the order of the route; each holds a different message."""

    def __init__(self, namesrv: FakeNamesrv, broker: FakeBroker, servers: list[FakeBroker]) -> None:
        self._namesrv = namesrv
        self._broker = broker
        self.all = servers
        self.listed(*servers)

    def listed(self, *servers: FakeBroker) -> None:
        route = self._namesrv.routes["T"]
        table = {self._broker.addr: [server.addr for server in servers]} if servers else {}
        self._namesrv.routes["T"] = msgspec.structs.replace(route, filter_server_table=table)

    def count(self, code: RequestCode) -> list[int]:
        return [server.requests.count(code) for server in self.all]


@pytest.fixture
async def servers(namesrv: FakeNamesrv, broker: FakeBroker) -> AsyncIterator[FilterServers]:
    namesrv.serve("T", broker, queues=2)
    async with FakeBroker("one") as one, FakeBroker("two") as two:
        for server in (one, two):
            for queue_id in (0, 1):
                server.store("T", queue_id, server.name.encode())
        yield FilterServers(namesrv, broker, [one, two])


@pytest.fixture
async def consumer(namesrv: FakeNamesrv) -> AsyncIterator[PullConsumer]:
    async with PullConsumer("g", namesrv=namesrv.addr) as running:
        yield running


async def pulled(consumer: PullConsumer, queue_id: int = 0, wanted: filter_class = WANTED) -> bytes:
    queue = (await consumer.fetch_queues("T"))[queue_id]
    return (await consumer.pull(queue, 0, expression=wanted)).messages[0].body


async def test_a_class_goes_to_each_server_once_and_queues_are_spread(
    servers: FilterServers, consumer: PullConsumer
) -> None:
    uploads = []
    servers.all[0].on(UPLOAD, lambda frame: (uploads.append((frame, bytes(frame.body))), frame.response())[1])
    for _ in range(3):
        assert {await pulled(consumer, queue_id) for queue_id in (0, 1)} == {b"one", b"two"}
    assert servers.count(UPLOAD) == [1, 1]
    ((frame, body),) = uploads
    header = frame.header(RegisterMessageFilterClassRequestHeader)
    assert (header.consumer_group, header.topic, header.class_name) == ("g", "T", "Wanted")
    assert header.class_crc == zlib.crc32(body) & 0x7FFFFFFF
    assert body == WANTED.source.encode()
    assert servers.all[0].pulls[0].sys_flag & 8


async def test_many_pulls_at_once_upload_once(servers: FilterServers, consumer: PullConsumer) -> None:
    await asyncio.gather(*(pulled(consumer) for _ in range(8)))
    assert sum(servers.count(UPLOAD)) == 1


async def test_another_class_is_uploaded_in_its_place(servers: FilterServers, consumer: PullConsumer) -> None:
    other = filter_class("Wanted", "class Wanted: pass\n")
    for wanted, uploads in ((WANTED, 1), (other, 2), (other, 2), (WANTED, 3)):
        await pulled(consumer, 0, wanted)
        assert sum(servers.count(UPLOAD)) == uploads


async def test_the_next_server_takes_over_from_one_that_is_gone(
    servers: FilterServers, consumer: PullConsumer
) -> None:
    first = await pulled(consumer)
    gone = servers.all[0 if first == b"one" else 1]
    gone.on(PULL, lambda _frame: gone.connections[-1].abort())
    with pytest.raises(Exception, match="lost"):
        await pulled(consumer)
    assert await pulled(consumer) != first
    assert sum(servers.count(UPLOAD)) == 2


async def test_a_server_that_has_forgotten_the_class_gets_it_again_before_the_caller_notices(
    servers: FilterServers, consumer: PullConsumer
) -> None:
    server = servers.all[0]
    servers.listed(server)
    await pulled(consumer)
    server.refuse(PULL, ResponseCode.FILTER_DATA_NOT_EXIST)
    server.on(UPLOAD, lambda frame: (server.scripts.clear(), frame.response())[1])
    assert await pulled(consumer) == b"one"
    assert servers.count(UPLOAD) == [2, 0]


async def test_a_server_that_forgets_the_class_at_once_is_the_callers_matter(
    servers: FilterServers, consumer: PullConsumer
) -> None:
    servers.listed(servers.all[0])
    servers.all[0].refuse(PULL, ResponseCode.FILTER_DATA_NOT_EXIST)
    with pytest.raises(BrokerError, match="FILTER_DATA_NOT_EXIST"):
        await pulled(consumer)
    assert (servers.count(UPLOAD), servers.count(PULL)) == ([2, 0], [2, 0])


async def test_a_class_that_fails_is_the_callers_matter_and_not_uploaded_again(
    servers: FilterServers, consumer: PullConsumer
) -> None:
    servers.listed(servers.all[0])
    servers.all[0].refuse(PULL, ResponseCode.SYSTEM_ERROR, "filter class Wanted: KeyError")
    for _ in range(3):
        with pytest.raises(BrokerError, match="KeyError"):
            await pulled(consumer)
    assert servers.count(UPLOAD) == [1, 0]


async def test_without_a_filter_server_nothing_is_pulled_and_the_route_is_asked_again(
    servers: FilterServers, consumer: PullConsumer, namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    servers.listed()
    with pytest.raises(NoRouteError, match=r"broker broker-a has no filter server.*filterServerNums"):
        await pulled(consumer)
    servers.listed(servers.all[1])
    async with asyncio.timeout(60):
        while True:
            try:
                assert await pulled(consumer) == b"two"
                break
            except NoRouteError:
                await asyncio.sleep(0.01)
    assert broker.pulls == []


async def test_a_push_consumer_says_so_in_its_heartbeat_and_takes_retries_from_the_broker(
    servers: FilterServers, namesrv: FakeNamesrv, broker: FakeBroker
) -> None:
    namesrv.serve("%RETRY%g", broker, queues=1)
    box = Box(namesrv)
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with PushConsumer("g", box, {"T": WANTED}, namesrv=namesrv.addr, options=options):
        await box.has(2)
        await broker.wait_for(lambda: broker.pulls)
    assert sorted(box.bodies) == [b"one", b"two"]
    assert {pull.topic for pull in broker.pulls} == {"%RETRY%g"}
    (data,) = (
        each for each in broker.heartbeats[0].consumer_data_set[0].subscription_data_set if each.topic == "T"
    )
    assert (data.class_filter_mode, data.sub_string, data.expression_type) == (True, "Wanted", "TAG")
    assert data.filter_class_source is None
