"""The ring that sends a tick's answers in one system call: over real sockets, on its own and in a server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.remoting.peers import RawPeer, raw_frame, until

from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, RemotingServer, tick
from cometmq.remoting.ring import ENTRIES, SendRing

KEEP, ECHO = 1, 2


@pytest.fixture
def ring() -> SendRing:
    try:
        return SendRing()
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL) or error.errno is None:
            pytest.skip(f"this system has no io_uring for us: {error}")
        raise


@contextlib.contextmanager
def pairs(count: int) -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    """Connected TCP sockets: ours, which never block, and those of the peers."""
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        ours, peers = [], []
        for _ in range(count):
            peers.append(stack.enter_context(socket.create_connection(listener.getsockname())))
            ours.append(stack.enter_context(listener.accept()[0]))
            ours[-1].setblocking(False)
            peers[-1].settimeout(20)
        yield ours, peers


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    return data


def fds(socks: list[socket.socket]) -> list[int]:
    return [sock.fileno() for sock in socks]


def test_every_socket_gets_its_own_bytes_however_often_the_ring_goes_round(ring: SendRing) -> None:
    rnd = random.Random(4)
    with pairs(ENTRIES) as (ours, peers):
        wanted = [b""] * ENTRIES
        for _ in range(40):
            count = rnd.choice([1, 2, 7, 100, ENTRIES - 1, ENTRIES])
            chosen = rnd.sample(range(ENTRIES), count)
            lots = [rnd.randbytes(rnd.randint(1, 300)) for _ in chosen]
            assert ring.send(fds([ours[at] for at in chosen]), list(lots)) == []
            for at, lot in zip(chosen, lots, strict=True):
                wanted[at] += lot
        assert [read(sock, len(data)) for sock, data in zip(peers, wanted, strict=True)] == wanted


def test_what_a_socket_does_not_take_is_told_and_the_others_get_theirs(ring: SendRing) -> None:
    with pairs(5) as (ours, peers):
        ours[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        long = os.urandom(32 << 20)  # more than any socket takes
        peers[2].close()
        ours[2].setblocking(True)
        assert ours[2].recv(1) == b""  # its end has arrived
        with contextlib.suppress(ConnectionError):
            ours[2].send(b"x")  # the peer resets it
        lots = [b"a", long, b"c", b"d", b"e"]
        places = fds(ours)
        places[3] = os.open("/dev/null", os.O_WRONLY)  # no socket
        try:
            left = dict(ring.send(places, list(lots)))
        finally:
            os.close(places[3])
        more = 0
        while took := dict(ring.send([ours[1].fileno()], [long]))[0]:  # until it is full: nobody waits for it
            more += took

        assert left.keys() == {1, 2, 3}
        assert (left[2], left[3]) == (0, 0)
        assert 0 < left[1] < len(long)
        assert read(peers[0], 1) + read(peers[4], 1) == b"ae"
        assert read(peers[1], left[1] + more).startswith(long[: left[1]])


def test_descriptors_that_are_closed_are_told_too(ring: SendRing) -> None:
    with pairs(2) as (ours, peers):
        assert ring.send([-1, ours[1].fileno(), 1_000_000], [b"a", b"b", b"c"]) == [(0, 0), (2, 0)]
        assert read(peers[1], 1) == b"b"


def test_signals_do_not_disturb_it(ring: SendRing) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGPROF, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_PROF, 0.0002, 0.0002)
    try:
        with pairs(64) as (ours, peers):
            for n in range(200):
                lot = struct.pack(">I", n) * 25
                assert ring.send(fds(ours), [lot] * 64) == []
                assert {read(sock, 100) for sock in peers} == {lot}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert seen


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_what_the_system_does_not_take_is_told(
    ring: SendRing, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """It may have no memory for a request, or none of us may enter any more."""
    enter = ring._enter
    with pairs(3) as (ours, peers):
        monkeypatch.setattr(ring, "_enter", lambda submit, complete: enter(taken, taken) if taken else 0)
        lots: list[Any] = [b"one", b"two", b"three"]
        assert ring.send(fds(ours), lots) == [(at, 0) for at in range(taken, 3)]
        monkeypatch.undo()
        assert ring.send(fds(ours[taken:]), lots[taken:]) == []
        assert [read(sock, len(lot)) for sock, lot in zip(peers, lots, strict=True)] == lots


def test_its_file_is_closed_with_it(ring: SendRing) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    another = SendRing()
    assert open_files() > before
    del another
    assert open_files() == before


# -- in a server


class Spy(SendRing):
    """A ring that counts what it sent."""

    sent = 0

    def send(self, fds: list[int], lots: list[Any]) -> list[tuple[int, int]]:
        left = super().send(fds, lots)
        Spy.sent += len(lots) - len(left)
        return left


@contextlib.asynccontextmanager
async def keeping() -> AsyncIterator[tuple[int, list[tuple[Connection, Frame]]]]:
    """A server that keeps its requests until the test answers them, all in one tick."""
    kept: list[tuple[Connection, Frame]] = []

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


async def ask_all(raws: list[RawPeer], kept: list[tuple[Connection, Frame]]) -> None:
    for n, raw in enumerate(raws):
        await raw.send(raw_frame(KEEP, n))
    await until(lambda: len(kept) == len(raws))


async def all_are_answered(raws: list[RawPeer], kept: list[tuple[Connection, Frame]]) -> None:
    kept.clear()
    await ask_all(raws, kept)
    for connection, request in kept:
        connection.respond(request, 0)
    for n, raw in enumerate(raws):
        assert (await raw.read())[0]["opaque"] == n


@pytest.fixture
def spy(ring: SendRing, monkeypatch: pytest.MonkeyPatch) -> type[Spy]:
    monkeypatch.setattr(tick, "SendRing", Spy)
    monkeypatch.setattr(Spy, "sent", 0)
    return Spy


async def test_answers_to_many_connections_leave_by_the_ring(spy: type[Spy]) -> None:
    count = ENTRIES + 44
    async with keeping() as (port, kept), peers(port, count) as raws:
        await ask_all(raws, kept)
        for connection, request in kept:
            connection.respond(request, 0, body=b"one")
            connection.respond(request, 0, body=b"two")
        for n, raw in enumerate(raws):
            for body in (b"one", b"two"):
                header, got = await raw.read()
                assert (header["opaque"], got) == (n, body)
    assert spy.sent == count


async def test_answers_to_few_connections_do_not(spy: type[Spy]) -> None:
    async with keeping() as (port, kept), peers(port, tick.FEWEST_FOR_RING - 1) as raws:
        await ask_all(raws, kept)
        for connection, request in kept:
            connection.respond(request, 0)
        for raw in raws:
            await raw.read()
    assert spy.sent == 0


async def test_a_peer_that_does_not_read_gets_its_answers_in_order_all_the_same(spy: type[Spy]) -> None:
    """Its socket fills up in the middle of an answer: the rest goes by the transport, and all that follows
    goes behind it."""
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
    # The ring served the one that does not read as long as its socket took something.
    assert rounds * 11 < spy.sent < rounds * 12


async def test_one_that_closes_in_the_middle_harms_no_other(spy: type[Spy]) -> None:
    async with keeping() as (port, kept), peers(port, 40) as raws:
        await ask_all(raws, kept)
        for raw in raws[::4]:
            raw.writer.transport.abort()
        kept[1][0].abort()
        kept[2][0].close()
        for connection, request in kept:
            connection.respond(request, 0, body=b"x")
        for n, raw in enumerate(raws):
            if n % 4 and n not in (1, 2):
                header, _ = await raw.read()
                assert header["opaque"] == n
        await asyncio.gather(*(raw.ask(ECHO, 7) for n, raw in enumerate(raws) if n % 4 and n not in (1, 2)))


async def test_a_connection_that_is_flushed_and_written_to_again_keeps_its_order(spy: type[Spy]) -> None:
    async with keeping() as (port, kept), peers(port, 12) as raws:
        await ask_all(raws, kept)
        for connection, request in kept:
            connection.respond(request, 0, body=b"one")
        for connection, request in kept[::2]:
            connection.flush()
            connection.respond(request, 0, body=b"two")
            connection.respond(request, 0, body=b"three")
        for n, raw in enumerate(raws):
            bodies = [b"one", b"two", b"three"] if n % 2 == 0 else [b"one"]
            assert [(await raw.read())[1] for _ in bodies] == bodies


async def test_a_ring_that_fails_ends_its_connections_and_is_not_used_again(
    spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for an answer that may have been lost with it."""
    rings: list[Spy] = []

    class Failing(Spy):
        def __init__(self) -> None:
            super().__init__()
            rings.append(self)

        def send(self, fds: list[int], lots: list[Any]) -> list[tuple[int, int]]:
            if len(rings) == 1:
                raise MemoryError
            return super().send(fds, lots)

    monkeypatch.setattr(tick, "SendRing", Failing)
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    async with keeping() as (port, kept):
        async with peers(port, 12) as raws:
            await ask_all(raws, kept)
            for connection, request in kept:
                connection.respond(request, 0)
            for raw in raws:
                assert await raw.read_end() == b""
        async with peers(port, 12) as raws:
            await all_are_answered(raws, kept)
    assert len(rings) == 2
    assert [type(context["exception"]) for context in seen] == [MemoryError]


async def test_one_that_cannot_be_flushed_leaves_nobody_waiting(
    spy: type[Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where so few are answered that each is flushed by itself."""
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
    few = tick.FEWEST_FOR_RING - 1
    async with keeping() as (port, kept):
        async with peers(port, few) as raws:
            await ask_all(raws, kept)
            for connection, request in kept:
                connection.respond(request, 0)
            for raw in raws:
                assert await raw.read_end() == b""
        async with peers(port, few) as raws:
            await all_are_answered(raws, kept)
    assert spy.sent == 0
    assert [type(context["exception"]) for context in seen] == [MemoryError]


async def test_without_io_uring_the_transports_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refused() -> SendRing:
        asked.append(1)
        raise PermissionError(errno.EPERM, "io_uring_setup: Operation not permitted")

    monkeypatch.setattr(tick, "SendRing", refused)
    with caplog.at_level("INFO", "cometmq.remoting.tick"):
        async with keeping() as (port, kept), peers(port, 20) as raws:
            for _ in range(3):
                await all_are_answered(raws, kept)
    assert asked == [1]
    assert "Operation not permitted" in caplog.text
