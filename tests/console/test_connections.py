"""Connections that send nothing, send slowly, or read nothing are closed after a while."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest
import uvicorn
from tests.kit.waiting import until

from cometmq.console.app import _Server
from cometmq.console.auth import connections
from cometmq.console.auth.connections import TimedProtocol
from cometmq.console.auth.http import respond

WITHIN_S = 60
LARGE = bytes(32 << 20)
"""More bytes than the buffers of both sides hold."""


async def app(scope: MutableMapping[str, Any], _receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await respond(send, 200, LARGE if scope["path"] == "/large" else b"small")


@pytest.fixture
async def address(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[str, int]]:
    """Start a server with room for three connections and short timeouts."""
    monkeypatch.setattr(connections, "HEADERS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connections, "EXCHANGE_TIMEOUT_S", 0.6)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=TimedProtocol, limit_concurrency=3, lifespan="off", log_config=None)
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    await until(lambda: server.started)
    yield listening.getsockname()
    server.should_exit = True
    await serving


async def status(address: tuple[str, int]) -> bytes:
    """Return the status line of a request on another connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    found = await reader.read()
    writer.close()
    return found.split()[1]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost:",
        b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["idle", "slow headers", "slow headers after an answer", "reads nothing"],
)
async def test_the_room_of_those_who_stand_in_it_is_free_again(address: tuple[str, int], said: bytes) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(WITHIN_S):
        standing = [socket.create_connection(address) for _ in range(3)]
        for each in standing:
            each.setblocking(False)
            await loop.sock_sendall(each, said)
        assert await status(address) == b"503"
        while await status(address) != b"200":
            await asyncio.sleep(0.02)
    for each in standing:
        each.close()


async def test_an_answer_that_is_read_comes_whole_and_the_connection_stays(address: tuple[str, int]) -> None:
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"small")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)
        writer.close()
