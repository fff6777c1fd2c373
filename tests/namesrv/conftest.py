"""Fixtures: name servers on their own ports, and the requests of brokers and clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit import raw_peer
from tests.kit.raw_peer import RawPeer

from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer

TOPIC_A = {"topicName": "TopicA", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicSysFlag": 0}


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


def config_in(path: Path, **properties: str) -> NamesrvConfig:
    return NamesrvConfig.from_properties(
        {
            "listenPort": "0",
            "bindAddress": "127.0.0.1",
            "kvConfigPath": str(path / "kvConfig.json"),
            "configStorePath": str(path / "namesrv.properties"),
            **properties,
        }
    )


@contextlib.asynccontextmanager
async def running(path: Path, clock: Clock | None = None, **properties: str) -> AsyncIterator[NameServer]:
    server = NameServer(config_in(path, **properties), now_ms=clock or Clock())
    await server.start()
    try:
        yield server
    finally:
        await server.stop(1)


def peer(server: NameServer) -> contextlib.AbstractAsyncContextManager[RawPeer]:
    return raw_peer.peer(server.port)


async def ask(
    raw: RawPeer, code: int, ext: dict[str, str] | None = None, body: bytes = b"", version: int = 407
) -> tuple[dict[str, Any], bytes]:
    return await raw.ask(code, 1, body, ext=ext, version=version)


def refused(answer: tuple[dict[str, Any], bytes], code: int, words: str) -> None:
    """Check that the response is a refusal with this code and text."""
    header, _ = answer
    assert header["code"] == code, header
    assert words in header["remark"]


async def key_value(raw: RawPeer, code: int, key: str = "k", value: str | None = None) -> dict[str, Any]:
    """Return the header of a response about a key in namespace n: 100 puts, 101 gets, 102 deletes it."""
    header, _ = await ask(raw, code, {"namespace": "n", "key": key, **({"value": value} if value else {})})
    return header


async def put_order(raw: RawPeer) -> None:
    """Set the order configuration of TopicA."""
    await ask(raw, 100, {"namespace": "ORDER_TOPIC_CONFIG", "key": "TopicA", "value": "broker-a:8"})


def topics_named(*names: str) -> list[dict[str, Any]]:
    return [{**TOPIC_A, "topicName": name} for name in names]


def registration(
    topics: list[dict[str, Any]], counter: int = 1, filter_servers: list[str] | None = None
) -> bytes:
    return json.dumps(
        {
            "filterServerList": filter_servers or [],
            "topicConfigSerializeWrapper": {
                "dataVersion": {"counter": counter, "timestamp": 1795170712333},
                "topicConfigTable": {topic["topicName"]: topic for topic in topics},
            },
        }
    ).encode()


def identity(
    name: str = "broker-a", addr: str = "10.0.0.1:10911", broker_id: int = 0, **more: str
) -> dict[str, str]:
    return {
        "brokerName": name,
        "brokerAddr": addr,
        "clusterName": "DefaultCluster",
        "haServerAddr": addr.replace("10911", "10912"),
        "brokerId": str(broker_id),
        **more,
    }


async def register(
    raw: RawPeer, *topics: dict[str, Any], counter: int = 1, version: int = 407, **who: Any
) -> Any:
    body = registration(list(topics) or [TOPIC_A], counter)
    header, answer = await ask(raw, 103, identity(**who), body, version)
    assert header["code"] == 0, header
    return header, answer


async def route(raw: RawPeer, topic: str = "TopicA", version: int = 409) -> tuple[int, Any]:
    header, body = await ask(raw, 105, {"topic": topic}, version=version)
    return header["code"], json.loads(body) if body else None


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NameServer]:
    async with running(tmp_path) as started:
        yield started


@pytest.fixture
async def raw(server: NameServer) -> AsyncIterator[RawPeer]:
    async with peer(server) as connected:
        yield connected
