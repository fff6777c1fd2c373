"""RemotingServer over real sockets, tested with plain sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.kit.raw_peer import peer, raw_frame
from tests.kit.waiting import soon, until

from cometmq.errors import CommandError
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Limits, RemotingServer, Tick

ECHO, LATER, SLOW, BOOM, REFUSE, SILENT, COUNT = 1, 2, 3, 4, 5, 6, 7
MIB = 1024 * 1024


def echo(connection: Connection, request: Frame) -> Frame:
    return request.response(0, body=bytes(request.body))


async def slow(connection: Connection, request: Frame) -> Frame:
    await asyncio.sleep(0)
    return request.response(0, body=bytes(request.body))


def boom(connection: Connection, request: Frame) -> Frame:
    raise ValueError("the handler is broken")


def refuse(connection: Connection, request: Frame) -> Frame:
    raise CommandError(17, "no such topic", {"seen": "yes"})


def silent(connection: Connection, request: Frame) -> None:
    return None


class Big:
    """A handler that responds with 100 kB and counts its requests."""

    handled = 0

    def __call__(self, connection: Connection, request: Frame) -> Frame:
        self.handled += 1
        return request.response(0, body=bytes(100_000))


class Held:
    """Requests that are held and answered together."""

    def __init__(self) -> None:
        self.requests: list[tuple[Connection, Frame]] = []

    def later(self, connection: Connection, request: Frame) -> None:
        self.requests.append((connection, request))

    def answer(self) -> None:
        while self.requests:
            connection, request = self.requests.pop(0)
            connection.respond(request, 0)


HANDLERS: dict[int, Any] = {ECHO: echo, SLOW: slow, BOOM: boom, REFUSE: refuse, SILENT: silent}


@contextlib.asynccontextmanager
async def serving(
    handlers: dict[int, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[RemotingServer, int]]:
    server = RemotingServer(handlers or HANDLERS, **options)
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop(1)


@contextlib.asynccontextmanager
async def deaf_peer(port: int) -> AsyncIterator[asyncio.StreamWriter]:
    """Connect a peer that sends and reads nothing, so that few responses fit into its buffers."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    try:
        yield writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("code", [ECHO, SLOW])
async def test_a_request_is_answered_with_its_opaque_and_body(code: int) -> None:
    async with serving() as (_, port), peer(port) as raw:
        header, body = await raw.ask(code, opaque=-7, body=b"hello")

    assert (header["code"], header["opaque"], header["flag"] & 1, body) == (0, -7, 1, b"hello")


async def test_pipelined_requests_are_all_answered() -> None:
    async with serving() as (_, port), peer(port) as raw:
        await raw.send(b"".join(raw_frame(ECHO, n, b"%d" % n) for n in range(500)))
        answers = [await raw.read() for _ in range(500)]

    assert [(header["opaque"], body) for header, body in answers] == [(n, b"%d" % n) for n in range(500)]


async def test_frames_delivered_byte_by_byte_are_answered() -> None:
    async with serving() as (_, port), peer(port) as raw:
        for byte in raw_frame(ECHO, 1, b"abc") + raw_frame(ECHO, 2, b""):
            await raw.send(bytes([byte]))
            await asyncio.sleep(0)
        answers = [await raw.read(), await raw.read()]

    assert [(header["opaque"], body) for header, body in answers] == [(1, b"abc"), (2, b"")]


async def test_frames_cut_anywhere_are_answered() -> None:
    """A stream with small, buffer-sized and very large frames is sent in random pieces."""
    dice = random.Random(3)
    bodies = [
        dice.randbytes(dice.choice([0, 10, 1_000, 40_000, 70_000, 300_000, 2_000_000])) for _ in range(60)
    ]
    stream = b"".join(raw_frame(ECHO, n, body) for n, body in enumerate(bodies))
    async with serving() as (_, port), peer(port) as raw:

        async def send() -> None:
            at = 0
            while at < len(stream):
                size = dice.choice([1, 3, 500, 5_000, 100_000, 600_000])
                await raw.send(stream[at : at + size])
                at += size
                if dice.random() < 0.3:
                    await asyncio.sleep(0)

        sender = asyncio.create_task(send())
        for n, expected in enumerate(bodies):
            header, body = await raw.read()
            assert (header["opaque"], body == expected) == (n, True)
        await sender


async def test_the_largest_frame_passes_and_a_larger_one_closes_the_connection() -> None:
    overhead = len(raw_frame(ECHO, 0, b""))
    async with serving() as (server, port):
        async with peer(port) as raw:
            body = bytes(16 * MIB - overhead - 64)  # leaves room for a longer header in the response
            header, back = await raw.ask(ECHO, 0, body)
            assert (header["code"], back == body) == (0, True)
            connection = next(iter(server.connections))
            assert connection.buffered == 0  # the large buffer is freed after its frame
        async with peer(port) as raw:
            await raw.send(struct.pack(">I", 16 * MIB - 3))
            assert await raw.read_end() == b""


async def test_a_length_word_alone_reserves_nothing() -> None:
    async with serving() as (server, port), peer(port) as raw:
        await raw.send(raw_frame(ECHO, 0, b""))
        await raw.read()
        await raw.send(struct.pack(">I", 15 * MIB) + b"\0\0")
        connection = next(iter(server.connections))
        await until(lambda: connection.buffered > 0)

        assert connection.buffered <= 64 * 1024


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(struct.pack(">I", 0), id="length zero"),
        pytest.param(struct.pack(">I", 3) + b"abc", id="shorter than the header word"),
        pytest.param(struct.pack(">i", -1), id="negative length"),
        pytest.param(struct.pack(">II", 8, 100) + b"{}  ", id="header longer than the frame"),
        pytest.param(struct.pack(">II", 6, 7 << 24 | 2) + b"{}", id="unknown serialization"),
        pytest.param(struct.pack(">II", 12, 8) + b"garbage!", id="not JSON"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP"),
    ],
)
async def test_a_bad_frame_closes_its_connection_after_the_answers_before_it(bad: bytes) -> None:
    held = Held()
    async with serving({LATER: held.later}) as (server, port), peer(port) as other, peer(port) as raw:
        server.tick.at_end(held.answer)
        await raw.send(raw_frame(LATER, 5) + bad)
        header, _ = await raw.read()
        assert header["opaque"] == 5
        assert await raw.read_end() == b""
        assert (await other.ask(LATER, 6))[0]["opaque"] == 6


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (BOOM, (1, "ValueError: the handler is broken", None)),
        (REFUSE, (17, "no such topic", {"seen": "yes"})),
        (99, (3, " request type 99 not supported", None)),
    ],
)
async def test_failures_are_answered(code: int, answer: tuple[int, str, dict[str, str] | None]) -> None:
    async with serving() as (_, port), peer(port) as raw:
        header, _ = await raw.ask(code)
        assert (header["code"], header["remark"], header.get("extFields")) == answer
        assert (await raw.ask(ECHO, 1))[0]["code"] == 0  # the connection still works


async def test_a_failing_async_handler_is_answered() -> None:
    async def fails(connection: Connection, request: Frame) -> Frame:
        await asyncio.sleep(0)
        raise CommandError(8, "later")

    async with serving({SLOW: fails}) as (_, port), peer(port) as raw:
        header, _ = await raw.ask(SLOW)

    assert (header["code"], header["remark"]) == (8, "later")


@pytest.mark.parametrize("code", [ECHO, SLOW, BOOM, REFUSE, 99])
async def test_oneway_requests_are_never_answered(code: int) -> None:
    async with serving() as (_, port), peer(port) as raw:
        await raw.send(raw_frame(code, 1, flag=2))
        header, _ = await raw.ask(ECHO, 2)

    assert header["opaque"] == 2


async def test_the_default_handler_gets_what_no_other_wants() -> None:
    async with serving({ECHO: silent}, default=echo) as (_, port), peer(port) as raw:
        _, body = await raw.ask(12345, body=b"to the default")

    assert body == b"to the default"


async def test_an_async_handler_keeps_its_body_while_other_frames_arrive() -> None:
    gate = asyncio.Event()

    async def wait(connection: Connection, request: Frame) -> Frame:
        await gate.wait()
        return request.response(0, body=bytes(request.body))

    async with serving({SLOW: wait, ECHO: echo}) as (_, port), peer(port) as raw:
        await raw.send(raw_frame(SLOW, 1, b"first" * 100))
        for n in range(20):
            await raw.ask(ECHO, 2 + n, b"x" * 1000)
        gate.set()
        _, body = await raw.read()

    assert body == b"first" * 100


async def test_the_tick_runs_after_all_frames_of_a_read_and_before_their_answers() -> None:
    seen: list[str] = []
    held = Held()

    def later(connection: Connection, request: Frame) -> None:
        seen.append(f"frame {request.opaque}")
        held.later(connection, request)

    def commit() -> None:
        seen.append(f"commit {len(held.requests)}")
        held.answer()

    async with serving({LATER: later}) as (server, port), peer(port) as raw:
        server.tick.at_end(commit)
        await raw.send(b"".join(raw_frame(LATER, n) for n in range(10)))
        for n in range(10):
            assert (await raw.read())[0]["opaque"] == n

    assert seen[:11] == [f"frame {n}" for n in range(10)] + ["commit 10"]


class CountingTransport(asyncio.Transport):
    """A transport that counts the data written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.writes: list[bytes] = []
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


def made(handle: Any, limits: Limits, tick: Tick | None = None) -> tuple[Connection, CountingTransport]:
    """Create a connection with manual input."""
    transport = CountingTransport()
    connection = Connection(handle, tick or Tick(), limits)
    connection.connection_made(transport)
    return connection, transport


def deliver(connection: Connection, frames: list[bytes]) -> None:
    data = b"".join(frames)
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


async def test_all_answers_of_a_tick_leave_in_one_write() -> None:
    from cometmq.remoting.dispatch import Dispatcher

    connection, transport = made(Dispatcher(HANDLERS), Limits())
    deliver(connection, [raw_frame(ECHO, n, b"x" * 100) for n in range(50)])
    assert transport.writes == []
    await until(lambda: bool(transport.writes))
    connection.connection_lost(None)

    assert len(transport.writes) == 1
    assert transport.writes[0].count(b'"opaque"') == 50


async def test_a_busy_connection_does_not_starve_another() -> None:
    order: list[str] = []
    tick, limits = Tick(), Limits(frames_per_callback=8)
    busy, busy_transport = made(lambda c, request: order.append("busy"), limits, tick)
    calm, _ = made(lambda c, request: order.append("calm"), limits, tick)
    deliver(busy, [raw_frame(LATER, n) for n in range(100)])
    assert busy_transport.reading is False
    deliver(calm, [raw_frame(LATER, 0)])
    assert order == ["busy"] * 8 + ["calm"]
    await until(lambda: len(order) == 101)
    assert busy_transport.reading is True
    for connection in (busy, calm):
        connection.connection_lost(None)


async def test_frames_that_take_long_end_the_callback_and_its_reads() -> None:
    done: list[int] = []
    connection, transport = made(lambda _, request: done.append(request.opaque), Limits(callback_s=0.0))
    for numbers, reading in (([1], False), ([2, 3], False)):
        deliver(connection, [raw_frame(LATER, n) for n in numbers])
        assert done == list(range(1, numbers[0] + 1))
        assert transport.reading is reading
        await until(lambda last=numbers[-1]: done[-1] == last and transport.reading)  # type: ignore[misc]
    connection.connection_lost(None)


async def test_frames_beyond_the_share_of_a_callback_are_handled_before_the_peer_sends_more() -> None:
    limits = Limits(frames_per_callback=3)
    async with serving(limits=limits) as (_, port), peer(port) as raw:
        await raw.send(b"".join(raw_frame(ECHO, n) for n in range(100)) + raw_frame(ECHO, 100)[:20])
        for n in range(100):
            assert (await raw.read())[0]["opaque"] == n
        await raw.send(raw_frame(ECHO, 100)[20:])
        assert (await raw.read())[0]["opaque"] == 100


async def test_requests_before_a_half_close_are_answered() -> None:
    held = Held()
    async with serving({LATER: held.later}) as (server, port), peer(port) as raw:
        server.tick.at_end(held.answer)
        raw.writer.write(raw_frame(LATER, 9))
        raw.writer.write_eof()
        header, _ = await raw.read()
        assert header["opaque"] == 9
        assert await raw.read_end() == b""
        await until(lambda: not server.connections)


async def test_a_reader_that_never_drains_stops_being_read_and_is_evicted() -> None:
    limits = Limits(write_high=64 * 1024, write_low=16 * 1024, write_stall_s=0.2)
    big = Big()
    async with serving({ECHO: big}, limits=limits, scan_s=0.05) as (server, port), deaf_peer(port) as writer:
        writer.write(b"".join(raw_frame(ECHO, n) for n in range(2000)))
        await until(lambda: big.handled > 0)
        await until(lambda: not server.connections)
        # Socket buffers hold some megabytes; 2,000 responses would be 200 MB.
        assert big.handled < 500
        async with peer(port) as raw:
            assert (await raw.ask(ECHO, 1))[0]["opaque"] == 1


async def test_reading_stops_while_answers_wait_even_from_a_peer_that_asks_one_by_one() -> None:
    limits = Limits(write_high=64 * 1024, write_low=16 * 1024)
    big = Big()
    async with serving({ECHO: big}, limits=limits) as (_, port), deaf_peer(port) as writer:
        for n in range(600):
            writer.write(raw_frame(ECHO, n))
            await asyncio.sleep(0.001 if n < 150 else 0)
        await asyncio.sleep(0.1)
        assert 0 < big.handled < 400


async def test_a_slow_reader_gets_everything() -> None:
    limits = Limits(write_high=64 * 1024, write_low=16 * 1024, write_stall_s=5)

    async with serving({ECHO: Big()}, limits=limits) as (_server, port), peer(port) as raw:
        sending = asyncio.create_task(raw.send(b"".join(raw_frame(ECHO, n) for n in range(300))))
        for n in range(300):
            header, body = await raw.read()
            assert (header["opaque"], len(body)) == (n, 100_000)
            if n % 50 == 0:
                await asyncio.sleep(0.01)
        await sending


async def test_answers_piling_up_without_requests_cut_the_connection() -> None:
    limits = Limits(write_high=64 * 1024, write_low=16 * 1024, write_evict=1 * MIB)
    async with serving({SILENT: silent}, limits=limits) as (server, port), deaf_peer(port):
        await until(lambda: len(server.connections) == 1)
        connection = next(iter(server.connections))
        pushed = 0
        while not connection.closed and pushed < 200 * MIB:
            connection.write(bytes(MIB // 4))
            pushed += MIB // 4
            await asyncio.sleep(0)
        assert connection.closed


async def test_idle_connections_are_closed_and_busy_ones_are_not() -> None:
    limits = Limits(idle_s=1.0)
    async with serving(limits=limits, scan_s=0.05) as (server, port), peer(port) as idle, peer(port) as busy:
        await until(lambda: len(server.connections) == 2)
        ended = asyncio.create_task(idle.read_end())
        while not ended.done():
            assert (await busy.ask(ECHO, 3))[0]["opaque"] == 3
            await asyncio.sleep(0.02)
        assert (await busy.ask(ECHO, 4))[0]["opaque"] == 4
        assert len(server.connections) == 1


async def test_open_and_close_are_told() -> None:
    told: list[tuple[str, str]] = []
    async with serving(
        on_open=lambda c: told.append(("open", c.peer)), on_close=lambda c: told.append(("close", c.peer))
    ) as (_, port):
        async with peer(port) as raw:
            host, own_port = raw.writer.get_extra_info("sockname")
            await raw.ask(ECHO)
        await until(lambda: len(told) == 2)

    assert told == [("open", f"{host}:{own_port}"), ("close", f"{host}:{own_port}")]


async def test_stop_lets_running_handlers_answer_and_then_closes() -> None:
    gate = asyncio.Event()
    begun = asyncio.Event()

    async def wait(connection: Connection, request: Frame) -> Frame:
        begun.set()
        await gate.wait()
        return request.response(0, body=b"finished")

    async with serving({SLOW: wait}) as (server, port), peer(port) as raw:
        await raw.send(raw_frame(SLOW, 1))
        await soon(begun.wait())
        stopping = asyncio.create_task(server.stop(5))
        await asyncio.sleep(0)
        gate.set()
        _, body = await raw.read()
        assert body == b"finished"
        assert await raw.read_end() == b""
        await soon(stopping)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("turns", range(4))
async def test_what_was_accepted_and_opens_after_the_stop_is_cut(turns: int) -> None:
    """Some loop iterations pass between accepting a connection and opening its transport."""
    async with serving() as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop(1)
            with contextlib.suppress(ConnectionResetError):
                assert await soon(asyncio.get_running_loop().sock_recv(raw, 1)) == b""


async def test_stop_cuts_handlers_and_peers_that_take_too_long() -> None:
    running = asyncio.Event()

    async def forever(connection: Connection, request: Frame) -> Frame:
        running.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving({SLOW: forever}) as (server, port), peer(port) as raw:
        await raw.send(raw_frame(SLOW, 1))
        await running.wait()
        await soon(server.stop(0.1), 5)
        assert await raw.read_end() == b""


async def test_two_servers_can_share_one_tick() -> None:
    tick = Tick()
    seen: list[int] = []
    tick.at_end(lambda: seen.append(1))
    async with (
        serving(tick=tick) as (_, first),
        serving(tick=tick) as (_, second),
        peer(first) as one,
        peer(second) as two,
    ):
        await one.ask(ECHO)
        await two.ask(ECHO)

    assert len(seen) >= 2


async def test_requests_can_be_diverted_for_a_while_also_from_shortcuts() -> None:
    def busy(connection: Connection, request: Frame) -> Frame:
        return request.response(2, body=b"busy")

    taken = []

    def shortcut(connection: Connection, buffer: memoryview, start: int, end: int, stop: int) -> bool:
        taken.append(bytes(buffer[end:stop]))
        return False

    async with serving(shortcuts={b'{"code":1,"f': shortcut}) as (server, port), peer(port) as raw:
        seen = []
        for codes in ((), (ECHO, 99), (), (REFUSE,)):
            server.override_handlers(codes, busy)
            async with peer(port) as newer:
                for each, code in ((raw, ECHO), (newer, ECHO), (raw, 99)):
                    header, body = await each.ask(code, body=b"hello")
                    seen.append((header["code"], body))

    own = [(0, b"hello"), (0, b"hello"), (3, b"")]
    assert seen == [*own, (2, b"busy"), (2, b"busy"), (3, b""), *own, *own]
    assert taken == [b"hello"] * 4  # the hook is not called while a handler override is active
