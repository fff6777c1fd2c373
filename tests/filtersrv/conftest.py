"""A filter server in the test's own loop, in front of a broker that does what a test tells it."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import pytest
from tests.client.fakes import FakeBroker

from cometmq.filtersrv import filters
from cometmq.filtersrv.server import FilterServer, Settings
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageRequestHeader, RegisterMessageFilterClassRequestHeader
from cometmq.protocol.record.one import iter_records
from cometmq.remoting import RemotingClient

EVEN = "class Wanted:\n    def match(self, message):\n        return int(message.body) % 2 == 0\n"


def matching(condition: str) -> str:
    """The source of a class that takes the messages for which an expression is true."""
    return f"class Wanted:\n    def match(self, message):\n        return {condition}\n"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes of classes a minute: on a busy machine a start takes more than five seconds."""
    for name in ("LOAD_TIMEOUT_S", "BATCH_TIMEOUT_S", "QUEUE_TIMEOUT_S"):
        monkeypatch.setattr(filters, name, 60.0)


class Consumer:
    """A bare client of a filter server."""

    def __init__(self, addr: str) -> None:
        self.addr = addr
        self.remoting = RemotingClient()

    async def upload(
        self,
        source: str | bytes,
        *,
        group: str = "g",
        topic: str = "T",
        name: str = "Wanted",
        crc: int | None = None,
    ) -> Frame:
        body = source if isinstance(source, bytes) else source.encode()
        header = RegisterMessageFilterClassRequestHeader(
            consumer_group=group,
            topic=topic,
            class_name=name,
            class_crc=zlib.crc32(body) & 0x7FFFFFFF if crc is None else crc,
        )
        request = Frame.request(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, header, body)
        return await self.remoting.call(self.addr, request, 20)

    async def pull(
        self, offset: int = 0, *, group: str = "g", topic: str = "T", hold_ms: int = 0, flags: int = 8
    ) -> Frame:
        header = PullMessageRequestHeader(
            consumer_group=group,
            topic=topic,
            queue_id=0,
            queue_offset=offset,
            max_msg_nums=4,
            sys_flag=flags | (2 if hold_ms else 0),
            commit_offset=3,
            suspend_timeout_millis=hold_ms,
        )
        return await self.remoting.call(self.addr, Frame.request(RequestCode.PULL_MESSAGE, header), 30)


def bodies(answer: Frame) -> list[bytes]:
    assert answer.code == 0, (answer.code, answer.remark)
    return [message.body for message in iter_records(answer.body)]


def next_offset(answer: Frame) -> int:
    assert answer.ext is not None
    return int(answer.ext["nextBeginOffset"])


@pytest.fixture
async def broker() -> AsyncIterator[FakeBroker]:
    async with FakeBroker("broker-a") as one:
        yield one


@pytest.fixture
def settings(broker: FakeBroker) -> Settings:
    return Settings(broker=broker.addr, host="127.0.0.1", interface="127.0.0.1", token="secret")


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[FilterServer]:
    running = FilterServer(settings)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def consumer(server: FilterServer) -> AsyncIterator[Consumer]:
    client = Consumer(server.addr)
    yield client
    await client.remoting.close()
