"""Fixtures: a filter server in the test's own event loop, with a fake broker."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator

import pytest
from tests.kit.brokers import Peer, records
from tests.kit.fakes import FakeBroker

from cometmq.filtersrv import filters
from cometmq.filtersrv import server as filter_server
from cometmq.filtersrv.server import FilterServer, Settings
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageRequestHeader, RegisterMessageFilterClassRequestHeader

EVEN = "class Wanted:\n    def match(self, message):\n        return int(message.body) % 2 == 0\n"


def matching(condition: str) -> str:
    """Return the source of a class that accepts the messages for which an expression is true."""
    return f"class Wanted:\n    def match(self, message):\n        return {condition}\n"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes of classes a minute: on a busy machine a start takes more than five seconds."""
    for name in ("LOAD_TIMEOUT_S", "BATCH_TIMEOUT_S", "QUEUE_TIMEOUT_S"):
        monkeypatch.setattr(filters, name, 60.0)


class Consumer(Peer):
    """A minimal client of a filter server."""

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
        return await self.call(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, header, body)

    async def pull(  # type: ignore[override]
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
        return await self.call(RequestCode.PULL_MESSAGE, header)


def bodies(answer: Frame) -> list[bytes]:
    return [message.body for message in records(answer)]


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
async def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FilterServer]:
    monkeypatch.setattr(filter_server, "REGISTER_S", 3600.0)  # tests start the registration themselves
    running = FilterServer(settings)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def consumer(server: FilterServer) -> AsyncIterator[Consumer]:
    async with Consumer(server.addr) as client:
        yield client
