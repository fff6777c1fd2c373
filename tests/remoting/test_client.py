"""RemotingClient with our server and with plain sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from tests.kit.raw_peer import RawPeer, raw_frame
from tests.kit.waiting import soon, until
from tests.remoting.test_server import echo, serving

from cometmq.errors import ConnectError, RequestTimeout, SendFailed
from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Limits, RemotingClient, RemotingServer, parse_addr

ECHO, LATER, NOTIFY = 1, 2, 40
KIB, MIB = 1024, 1024 * 1024
TIGHT = Limits(
    write_high=64 * KIB, write_low=16 * KIB, write_wait=256 * KIB, write_evict=MIB, write_total=MIB
)


@contextlib.asynccontextmanager
async def client_and_server(
    handlers: dict[int, Any], calling: dict[int, Any] | None = None
) -> AsyncIterator[tuple[RemotingClient, RemotingServer, str]]:
    async with serving(handlers) as (server, port):
        client = RemotingClient(calling, limits=Limits(connect_timeout_s=60))
        try:
            yield client, server, f"127.0.0.1:{port}"
        finally:
            await client.close(1)


@contextlib.asynccontextmanager
async def plain_server(script: Callable[[RawPeer], Awaitable[None]]) -> AsyncIterator[str]:
    """Listen on a socket and run `script` for each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = RawPeer(reader, writer)
        try:
            await script(raw)
        finally:
            await raw.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await listener.wait_closed()


async def deaf(raw: RawPeer) -> None:
    await raw.read_end()


def reads_later(go: asyncio.Event) -> Callable[[RawPeer], Awaitable[None]]:
    """Return a script that reads one request, notifies the client, and reads and answers all after `go`."""

    async def script(raw: RawPeer) -> None:
        header, _ = await raw.read()
        await raw.send(raw_frame(NOTIFY, 7, flag=2))
        await go.wait()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await raw.send(raw_frame(0, header["opaque"], flag=1))
                header, _ = await raw.read()

    return script


@pytest.fixture
async def client() -> AsyncIterator[RemotingClient]:
    made = RemotingClient()
    yield made
    await made.close()


async def test_a_thousand_concurrent_calls_share_one_connection() -> None:
    async with client_and_server({ECHO: echo}) as (client, server, addr):
        bodies = [b"%d" % n * (n % 50) for n in range(1000)]
        answers = await asyncio.gather(
            *(client.call(addr, Frame.request(ECHO, body=body), 20) for body in bodies)
        )

        assert [bytes(answer.body) for answer in answers] == bodies
        assert len(server.connections) == 1
        connection = client.connection(addr)
        assert connection is not None
        assert connection.outstanding == 0


async def test_a_stall_longer_than_the_connect_timeout_fails_no_call() -> None:
    """Timers run before sockets are read, so after a stall both the timeout and the connection are due."""
    async with serving({ECHO: echo}) as (_, port):
        client = RemotingClient(limits=Limits(connect_timeout_s=0.1))
        addr = f"127.0.0.1:{port}"
        calls = [asyncio.ensure_future(client.call(addr, Frame.request(ECHO), 20)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 # the loop stands still
        answers = await asyncio.gather(*calls)
        await client.close(1)

    assert [answer.code for answer in answers] == [0, 0, 0]


async def test_a_request_whose_time_was_over_when_it_was_connected_was_not_sent() -> None:
    """A RequestTimeout means that the server may have run the request; a read is then not retried."""
    async with serving({ECHO: echo}) as (_, port):
        client = RemotingClient(limits=Limits(connect_timeout_s=20))
        call = asyncio.ensure_future(client.call(f"127.0.0.1:{port}", Frame.request(ECHO), 0.1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 # the loop stands still
        with pytest.raises(ConnectError, match=r"no connection within 0\.1 s"):
            await call
        await client.close(1)


async def test_answers_out_of_order_find_their_callers(client: RemotingClient) -> None:
    async def backwards(raw: RawPeer) -> None:
        requests = [await raw.read() for _ in range(100)]
        random.Random(5).shuffle(requests)
        for header, body in requests:
            await raw.send(raw_frame(0, header["opaque"], body, flag=1))
        await raw.read_end()

    async with plain_server(backwards) as addr:
        answers = await asyncio.gather(
            *(client.call(addr, Frame.request(ECHO, body=b"%d" % n), 20) for n in range(100))
        )

    assert [bytes(answer.body) for answer in answers] == [b"%d" % n for n in range(100)]


async def test_an_answer_delivered_byte_by_byte_arrives(client: RemotingClient) -> None:
    async def drip(raw: RawPeer) -> None:
        header, body = await raw.read()
        for byte in raw_frame(0, header["opaque"], body, flag=1):
            await raw.send(bytes([byte]))
            await asyncio.sleep(0)
        await raw.read_end()

    async with plain_server(drip) as addr:
        answer = await client.call(addr, Frame.request(ECHO, body=b"drops"), 20)

    assert answer.body == b"drops"


async def test_a_call_that_is_not_answered_times_out_and_its_late_answer_is_dropped(
    client: RemotingClient,
) -> None:
    release = asyncio.Event()

    async def late(raw: RawPeer) -> None:
        first, _ = await raw.read()
        await release.wait()
        await raw.send(raw_frame(0, first["opaque"], b"too late", flag=1))
        second, _ = await raw.read()
        await raw.send(raw_frame(0, second["opaque"], b"in time", flag=1))
        await raw.read_end()

    async with plain_server(late) as addr:
        with pytest.raises(RequestTimeout) as caught:
            await soon(client.call(addr, Frame.request(ECHO), 0.1))
        release.set()
        answer = await client.call(addr, Frame.request(ECHO), 10)

    assert (caught.value.addr, caught.value.code) == (addr, ECHO)
    assert answer.body == b"in time"


async def test_calls_time_out_each_at_its_own_deadline(client: RemotingClient) -> None:
    async with plain_server(deaf) as addr:
        await client.connect(addr)
        loop = asyncio.get_running_loop()

        async def timed(timeout_s: float) -> float:
            begun = loop.time()
            with pytest.raises(RequestTimeout):
                await client.call(addr, Frame.request(ECHO), timeout_s)
            return loop.time() - begun

        limits = [0.5, 0.1, 0.3, 0.1, 0.2]
        longest = asyncio.create_task(client.call(addr, Frame.request(ECHO), 60))
        took = await asyncio.gather(*(timed(limit) for limit in limits))
        longest.cancel()

    for limit, seconds in zip(limits, took, strict=True):
        assert limit - 0.01 <= seconds < limit + 10


async def test_a_connection_closed_in_the_middle_fails_what_is_outstanding(client: RemotingClient) -> None:
    async def half(raw: RawPeer) -> None:
        header, _ = await raw.read()
        await raw.send(raw_frame(0, header["opaque"], b"0123456789", flag=1)[:-5])

    async with plain_server(half) as addr:
        results = await soon(
            asyncio.gather(
                *(client.call(addr, Frame.request(ECHO + n), 30) for n in range(3)), return_exceptions=True
            )
        )
        assert client.connection(addr) is None

    assert [type(result) for result in results] == [SendFailed] * 3
    assert sorted((error.addr, error.code) for error in results) == [(addr, ECHO + n) for n in range(3)]


async def test_an_answer_nobody_can_read_closes_the_connection(client: RemotingClient) -> None:
    async def garbage(raw: RawPeer) -> None:
        await raw.read()
        await raw.send(struct.pack(">II", 12, 8) + b"garbage!")
        await raw.read_end()

    async with plain_server(garbage) as addr:
        with pytest.raises(SendFailed):
            await soon(client.call(addr, Frame.request(ECHO), 30))


async def test_the_next_call_after_a_lost_connection_connects_again() -> None:
    async with client_and_server({ECHO: echo}) as (client, server, addr):
        await client.call(addr, Frame.request(ECHO))
        for connection in list(server.connections):
            connection.abort()
        await until(lambda: client.connection(addr) is None)
        answer = await client.call(addr, Frame.request(ECHO, body=b"again"))

        assert answer.body == b"again"


async def test_callers_share_one_attempt_to_connect(client: RemotingClient) -> None:
    accepted = 0

    async def count(raw: RawPeer) -> None:
        nonlocal accepted
        accepted += 1
        while True:
            try:
                header, body = await raw.read()
            except asyncio.IncompleteReadError:
                return
            await raw.send(raw_frame(0, header["opaque"], body, flag=1))

    async with plain_server(count) as addr:
        await asyncio.gather(*(client.call(addr, Frame.request(ECHO), 10) for _ in range(50)))

    assert accepted == 1


class SlowToDial(RemotingClient):
    """A client that connects only once the gate is open."""

    gate: asyncio.Event
    dials = 0

    async def _dial(self, addr: str) -> Connection:
        self.dials += 1
        await self.gate.wait()
        return await super()._dial(addr)


async def test_a_caller_that_gives_up_while_dialling_does_not_take_the_attempt_from_others() -> None:
    client = SlowToDial()
    client.gate = asyncio.Event()
    async with serving({ECHO: echo}) as (_, port):
        addr = f"127.0.0.1:{port}"
        first = asyncio.create_task(client.call(addr, Frame.request(ECHO), 10))
        second = asyncio.create_task(client.call(addr, Frame.request(ECHO, body=b"2"), 10))
        await until(lambda: client.dials > 0)
        first.cancel()
        await until(first.cancelled)
        client.gate.set()
        assert (await soon(second)).body == b"2"
        assert client.dials == 1
        await client.close()


async def test_a_refused_connection_is_a_typed_error_that_names_the_address(client: RemotingClient) -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    addr = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    await listener.wait_closed()
    with pytest.raises(ConnectError) as caught:
        await client.call(addr, Frame.request(ECHO))

    assert caught.value.addr == addr


async def test_an_unknown_host_is_said_to_be_unknown(client: RemotingClient) -> None:
    with pytest.raises(ConnectError) as caught:
        await client.call("no-such-host.invalid:9876", Frame.request(ECHO), 20)

    assert "no-such-host.invalid:9876" in str(caught.value)
    assert "Unknown error" not in str(caught.value)


def dialling(monkeypatch: pytest.MonkeyPatch, connect: object) -> None:
    monkeypatch.setattr("cometmq.remoting.client.dial", connect)


@pytest.mark.parametrize("failure", [UnicodeError("idna"), ValueError("null byte"), OverflowError("port")])
async def test_connects_raise_connect_errors_only(
    client: RemotingClient, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    async def fails(*args: object, **kw: object) -> None:
        raise failure

    dialling(monkeypatch, fails)
    with pytest.raises(ConnectError) as caught:
        await client.connect("127.0.0.1:9876")

    assert repr(failure) in str(caught.value)
    assert caught.value.__cause__ is failure


async def test_closing_the_client_ends_connects_with_a_typed_error(
    client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*args: object, **kw: object) -> None:
        await asyncio.Event().wait()

    dialling(monkeypatch, hangs)
    connecting = asyncio.create_task(client.connect("127.0.0.1:9876"))
    await asyncio.sleep(0)
    await client.close()

    with pytest.raises(ConnectError, match="the client is closed"):
        await connecting


async def test_connecting_takes_no_longer_than_its_limit() -> None:
    """A listener with a full backlog drops further connection attempts silently."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fill = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(listener.getsockname())
            fill.append(sock)
        client = RemotingClient(limits=Limits(connect_timeout_s=0.3))
        addr = f"127.0.0.1:{listener.getsockname()[1]}"
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(ConnectError) as caught:
            await client.call(addr, Frame.request(ECHO), 30)
        took = loop.time() - begun
        await client.close()
        for sock in fill:
            sock.close()

    assert caught.value.addr == addr
    assert 0.25 < took < 20


async def test_the_server_calls_the_client_with_colliding_opaques() -> None:
    """Both directions use the same opaque numbers, and each response still reaches its own caller."""

    async def ask_back(connection: Connection, request: Frame) -> Frame:
        back = await connection.call(Frame.request(NOTIFY, body=b"server asks"), 10)
        return request.response(0, body=b"client said " + bytes(back.body))

    def answer(connection: Connection, request: Frame) -> Frame:
        return request.response(0, body=bytes(request.body).upper())

    async with client_and_server({LATER: ask_back}, calling={NOTIFY: answer}) as (client, _, addr):
        answers = await asyncio.gather(*(client.call(addr, Frame.request(LATER), 20) for _ in range(20)))

    assert {bytes(frame.body) for frame in answers} == {b"client said SERVER ASKS"}


async def test_a_oneway_request_is_handled_and_not_answered() -> None:
    got: list[bytes] = []

    def note(connection: Connection, request: Frame) -> Frame:
        got.append(bytes(request.body))
        return request.response(0)

    async with client_and_server({LATER: note, ECHO: echo}) as (client, _, addr):
        (await client.connect(addr)).oneway(Frame.request(LATER, body=b"one way"))
        answer = await client.call(addr, Frame.request(ECHO, body=b"x"))

    assert (got, answer.body) == ([b"one way"], b"x")


async def test_unsent_requests_neither_close_the_connection_nor_stop_its_reads() -> None:
    go = asyncio.Event()
    client = RemotingClient({NOTIFY: lambda *_: go.set()}, limits=TIGHT)
    async with plain_server(reads_later(go)) as addr:
        calls = [client.call(addr, Frame.request(ECHO, body=bytes(MIB)), 20) for _ in range(16)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        go.set()
        await client.close(1)
    assert all(isinstance(answer, Frame) for answer in answers)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_sends_wait_while_much_is_unsent_and_small_requests_do_not(is_lost: bool) -> None:
    go = asyncio.Event()
    sent: list[tuple[int, bool]] = []

    def note(frame: Frame) -> None:
        sent.append((frame.code, connection.full))

    client = RemotingClient({NOTIFY: lambda *_: None}, limits=TIGHT, outgoing=note)

    def send(timeout_s: float) -> asyncio.Task[Frame]:
        frame = Frame.request(ECHO, body=bytes(MIB))
        return asyncio.create_task(client.call(addr, frame, timeout_s, wait_for_room=True))

    async with plain_server(reads_later(go)) as addr:
        connection = await client.connect(addr)
        sends = [send(30) for _ in range(40)]
        await until(lambda: connection.full)
        with pytest.raises(RequestTimeout):
            await send(0.1)
        small = asyncio.create_task(client.call(addr, Frame.request(LATER), 30))
        await asyncio.sleep(0)
        sent_before = list(sent)
        if is_lost:
            connection.abort()
        else:
            go.set()
        ends = await asyncio.gather(small, *sends, return_exceptions=True)
        go.set()
        await client.close(1)

    assert all(isinstance(end, SendFailed if is_lost else Frame) for end in ends)
    assert len(sent_before) < 41
    assert sent_before[-1] == (LATER, True)
    assert (ECHO, True) not in sent


@pytest.mark.parametrize("room_until_s", [2.5, 3.5])
async def test_a_send_waits_only_for_the_rest_of_its_timeout(
    client: RemotingClient, monkeypatch: pytest.MonkeyPatch, room_until_s: float
) -> None:
    clock = Mock(**{"time.side_effect": [0.0, 2.0, room_until_s]})
    connection = AsyncMock()
    monkeypatch.setattr(client, "_loop", clock)
    monkeypatch.setattr(client, "connect", AsyncMock(return_value=connection))
    call = client.call("a:1", Frame.request(ECHO), 3.0, wait_for_room=True)
    if room_until_s < 3:
        await call
        assert connection.request.call_args.args[1] == 0.5
    else:
        with pytest.raises(RequestTimeout):
            await call
    assert connection.room.call_args.args == (ECHO, 1.0)


async def test_closing_the_client_fails_outstanding_calls(client: RemotingClient) -> None:
    async with plain_server(deaf) as addr:
        await client.connect(addr)
        calling = asyncio.create_task(client.call(addr, Frame.request(ECHO), 30))
        connection = client.connection(addr)
        assert connection is not None
        await until(lambda: connection.outstanding == 1)
        await client.close()
        with pytest.raises(SendFailed):
            await soon(calling)
        with pytest.raises(ConnectError):
            await client.call(addr, Frame.request(ECHO))


async def test_a_caller_that_gives_up_does_not_disturb_the_others() -> None:
    held: list[tuple[Connection, Frame]] = []

    def later(connection: Connection, request: Frame) -> None:
        request.body = bytes(request.body)
        held.append((connection, request))

    async with client_and_server({LATER: later}) as (client, _, addr):
        first = asyncio.create_task(client.call(addr, Frame.request(LATER, body=b"1"), 20))
        second = asyncio.create_task(client.call(addr, Frame.request(LATER, body=b"2"), 20))
        await until(lambda: len(held) == 2)
        first.cancel()
        await asyncio.sleep(0)
        for connection, request in held:
            connection.answer(request.response(0, body=bytes(request.body)))

        assert (await soon(second)).body == b"2"


@pytest.mark.parametrize(
    ("addr", "parts"),
    [
        ("127.0.0.1:9876", ("127.0.0.1", 9876)),
        ("broker-a.example:10911", ("broker-a.example", 10911)),
        ("[::1]:9876", ("::1", 9876)),
        (" 10.0.0.1:1 ", ("10.0.0.1", 1)),
        ("fe80::1%eth0:10911", ("fe80::1%eth0", 10911)),
        ("broker_a:10911", ("broker_a", 10911)),
    ],
)
def test_addresses(addr: str, parts: tuple[str, int]) -> None:
    assert parse_addr(addr) == parts


@pytest.mark.parametrize(
    "addr",
    [
        "", "host", "host:", ":9876", "host:port", "host:0", "host:65536", "host:-1", "..:1", "a..b:1",
        "x" * 64 + ".example:1", "a b:1", "[:1", "[]:1", "[host]:1", "höst:1", "host:\uff11",
        "a\0b:1",
        "a\nb:1", "\ud800:1", "host:\u00b2", "host:" + "9" * 200,
    ],
)  # fmt: skip
def test_wrong_addresses_are_named(addr: str) -> None:
    with pytest.raises(ConnectError) as caught:
        parse_addr(addr)

    assert caught.value.addr == addr
