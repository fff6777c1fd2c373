"""The end of a tick, when a server writes the output of all its connections, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.raw_peer import RawPeer, raw_frame
from tests.kit.waiting import until

from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, RemotingServer

KEEP, ECHO = 1, 2

Kept = list[tuple[Connection, Frame]]


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


@contextlib.asynccontextmanager
async def keeping() -> AsyncIterator[tuple[int, Kept]]:
    """Run a server that holds its requests until the test answers them, all in one tick."""
    kept: Kept = []

    def keep(connection: Connection, request: Frame) -> None:
        kept.append((connection, request))

    server = RemotingServer({KEEP: keep, ECHO: lambda _, request: request.response(0)})
    port = await server.start("127.0.0.1", 0)
    try:
        yield port, kept
    finally:
        await server.stop(1)


@contextlib.asynccontextmanager
async def peers(port: int, count: int) -> AsyncIterator[list[RawPeer]]:
    raws = [await RawPeer.connect(port) for _ in range(count)]
    try:
        yield raws
    finally:
        for raw in raws:
            await raw.close()


async def ask_all(raws: list[RawPeer], kept: Kept) -> None:
    for n, raw in enumerate(raws):
        await raw.send(raw_frame(KEEP, n))
    await until(lambda: len(kept) == len(raws))


async def test_answers_to_many_connections_leave_each_with_its_own() -> None:
    async with keeping() as (port, kept), peers(port, 300) as raws:
        await ask_all(raws, kept)
        for connection, request in kept:
            connection.answer(request.response(0, body=b"one"))
            connection.answer(request.response(0, body=b"two"))
        for n, raw in enumerate(raws):
            for body in (b"one", b"two"):
                header, got = await raw.read()
                assert (header["opaque"], got) == (n, body)


async def test_a_peer_that_does_not_read_gets_its_answers_in_order_all_the_same() -> None:
    """The peer's socket buffer fills up in the middle of a response; later ones are queued after its rest."""
    rounds, body = 400, 30_000
    wanted = b""
    async with keeping() as (port, kept), peers(port, 11) as raws:
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.settimeout(20)
            slow.sendall(raw_frame(KEEP, 0))
            await until(lambda: len(kept) == 1)
            await asyncio.gather(*(raw.send(raw_frame(KEEP, 0)) for raw in raws))
            await until(lambda: len(kept) == 12)
            for n in range(rounds):
                for connection, _ in kept:
                    long = connection is kept[0][0]
                    answer = raw_frame(KEEP, n, bytes([n % 256]) * (body if long else 1), flag=1)
                    connection.write(answer)
                    wanted += answer if long else b""
                await asyncio.gather(*(raw.read() for raw in raws))
            got = await asyncio.to_thread(read, slow, len(wanted))
    assert got == wanted


async def test_one_that_closes_in_the_middle_harms_no_other() -> None:
    async with keeping() as (port, kept), peers(port, 40) as raws:
        await ask_all(raws, kept)
        for raw in raws[::4]:
            raw.writer.transport.abort()
        kept[1][0].abort()
        kept[2][0].close()
        for connection, request in kept:
            connection.answer(request.response(0, body=b"x"))
        for n, raw in enumerate(raws):
            if n % 4 and n not in (1, 2):
                header, _ = await raw.read()
                assert header["opaque"] == n
        await asyncio.gather(*(raw.ask(ECHO, 7) for n, raw in enumerate(raws) if n % 4 and n not in (1, 2)))


async def test_a_connection_that_is_flushed_and_written_to_again_keeps_its_order() -> None:
    async with keeping() as (port, kept), peers(port, 12) as raws:
        await ask_all(raws, kept)
        for connection, request in kept:
            connection.answer(request.response(0, body=b"one"))
        for connection, request in kept[::2]:
            connection.flush()
            connection.answer(request.response(0, body=b"two"))
            connection.answer(request.response(0, body=b"three"))
        for n, raw in enumerate(raws):
            bodies = [b"one", b"two", b"three"] if n % 2 == 0 else [b"one"]
            assert [(await raw.read())[1] for _ in bodies] == bodies


async def test_one_that_cannot_be_flushed_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections of that tick are closed, because the data sent is unknown; new ones are served."""
    flush = Connection.flush
    flushed: list[Connection] = []

    def failing(connection: Connection) -> None:
        flushed.append(connection)
        if len(flushed) == 1:
            raise MemoryError
        flush(connection)

    monkeypatch.setattr(Connection, "flush", failing)
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    async with keeping() as (port, kept):
        async with peers(port, 12) as raws:
            await ask_all(raws, kept)
            for connection, request in kept:
                connection.respond(request, 0)
            for raw in raws:
                assert await raw.read_end() == b""
        kept.clear()
        async with peers(port, 12) as raws:
            await ask_all(raws, kept)
            for connection, request in kept:
                connection.respond(request, 0)
            for n, raw in enumerate(raws):
                assert (await raw.read())[0]["opaque"] == n
    assert [type(context["exception"]) for context in seen] == [MemoryError]
