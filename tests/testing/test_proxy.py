"""The fault proxy with an echo server: the effect of each fault, in each direction, at each byte."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.waiting import until

from cometmq.errors import ClientStateError, ConfigError
from cometmq.testing import Direction, Fault, FaultProxy, Kind, random_faults

UP, DOWN = Direction.TO_SERVER, Direction.TO_CLIENT
SOON_S = 60.0


class Echo:
    """An echo server that stores its input and records how connections ended."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.pieces: list[bytes] = []
        self.ends: list[str] = []
        self.addr = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                self.got += data
                self.pieces.append(data)
                writer.write(data)
                await writer.drain()
            self.ends.append("end")
        except ConnectionError:
            self.ends.append("reset")
        finally:
            writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.addr = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield echo
    server.close()


async def connected(proxy: FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = proxy.addr.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def received(proxy: FaultProxy, data: bytes) -> tuple[bytes, str]:
    """Send data, then the end; return the data that comes back and how the connection ends."""
    reader, writer = await connected(proxy)
    got = bytearray()
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(SOON_S):
            while piece := await reader.read(65536):
                got += piece
        return bytes(got), "end"
    except ConnectionError:
        return bytes(got), "reset"
    finally:
        writer.close()


CASES: list[tuple[Sequence[Fault], bytes, str, int]] = [
    # Faults, returned part of 100,000 bytes, end of the connection, and minimum of bytes that the server
    # receives.
    ([], b"x" * 100_000, "end", 100_000),
    ([Fault(kind=Kind.CUT, directions=(UP,), after=1000)], b"", "reset", 0),
    ([Fault(kind=Kind.HALF_CLOSE, directions=(UP,), after=1000)], b"x" * 1000, "end", 1000),
    ([Fault(kind=Kind.HALF_CLOSE, directions=(DOWN,), after=1000)], b"x" * 1000, "end", 100_000),
    ([Fault(kind=Kind.STALL, seconds=0.01, after=7)], b"x" * 100_000, "end", 100_000),
    ([Fault(kind=Kind.DELAY, seconds=0.001)], b"x" * 100_000, "end", 100_000),
    ([Fault(kind=Kind.SPLIT, size=999, after=1)], b"x" * 100_000, "end", 100_000),
    ([Fault(kind=Kind.SPLIT, size=50), Fault(kind=Kind.CUT, after=500)], b"", "reset", 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " and ".join(each.kind.value for each in case[0]))
async def test_each_fault_does_what_it_says(
    echo: Echo, case: tuple[Sequence[Fault], bytes, str, int]
) -> None:
    faults, expected, end, at_server = case
    async with FaultProxy(echo.addr, lambda number: faults) as proxy:
        got, ended = await received(proxy, b"x" * 100_000)
        assert ended == end
        if end == "end":
            assert got == expected
        assert expected.startswith(got) or end == "reset"

        async def server_is_done() -> bool:
            return bool(echo.ends)

        await until(server_is_done, "the server's end")
        assert len(echo.got) >= at_server
        assert proxy.happened.keys() == {each.kind for each in faults}


HARMLESS = st.builds(
    Fault,
    kind=st.sampled_from([Kind.STALL, Kind.DELAY, Kind.SPLIT]),
    directions=st.sampled_from([(UP,), (DOWN,), (UP, DOWN)]),
    after=st.integers(0, 3000),
    seconds=st.floats(1e-6, 0.002),
    size=st.integers(1, 500),
)


@settings(max_examples=25)
@given(st.lists(HARMLESS, max_size=5), st.binary(max_size=50).map(lambda data: data * 60))
def test_faults_that_lose_nothing_lose_nothing(faults: list[Fault], data: bytes) -> None:
    async def through() -> None:
        echo = Echo()
        async with await asyncio.start_server(echo.serve, "127.0.0.1", 0) as server:
            target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with FaultProxy(target, lambda number: faults) as proxy:
                assert await received(proxy, data) == (data, "end")
        assert bytes(echo.got) == data

    asyncio.run(through())


async def test_a_cut_comes_behind_exactly_so_many_bytes(echo: Echo) -> None:
    async with FaultProxy(echo.addr, lambda _: [Fault(kind=Kind.CUT, directions=(DOWN,), after=10)]) as proxy:
        reader, writer = await connected(proxy)
        writer.write(b"0123456789abcdef")
        assert await reader.readexactly(10) == b"0123456789"
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_bytes_are_split(echo: Echo) -> None:
    async with FaultProxy(echo.addr, lambda _: [Fault(kind=Kind.SPLIT, directions=(UP,), size=1)]) as proxy:
        await received(proxy, b"abc" * 10)
    assert bytes(echo.got) == b"abc" * 10
    assert len(echo.pieces) > 10  # the kernel may join some pieces


@pytest.mark.parametrize("kind", [Kind.DELAY, Kind.STALL])
@pytest.mark.parametrize("direction", [UP, DOWN])
async def test_a_delay_and_a_stall_take_their_time(echo: Echo, kind: Kind, direction: Direction) -> None:
    fault = Fault(kind=kind, directions=(direction,), after=1, seconds=0.15)
    async with FaultProxy(echo.addr, lambda _: [fault]) as proxy:
        reader, writer = await connected(proxy)
        sent: list[float] = []
        arrived: list[float] = []
        for piece in (b"a", b"b", b"c"):
            sent.append(time.monotonic())
            writer.write(piece)
            assert await reader.readexactly(1) == piece
            arrived.append(time.monotonic())
        writer.close()
    if kind is Kind.DELAY:
        assert arrived[1] - sent[1] >= 0.14
        assert arrived[2] - sent[2] >= 0.14
    else:  # the stall begins when the first byte has passed, perhaps long before the second one is sent
        assert arrived[1] - sent[0] >= 0.14


async def test_a_stall_holds_until_it_is_healed_and_the_sender_feels_it(echo: Echo) -> None:
    async with FaultProxy(echo.addr) as proxy:
        reader, writer = await connected(proxy)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        proxy.inflict(Fault(kind=Kind.STALL, directions=(UP,), seconds=math.inf))
        await asyncio.sleep(0)
        writer.write(b"x" * 10_000_000)
        with pytest.raises(TimeoutError):  # the sockets' buffers are full
            await asyncio.wait_for(writer.drain(), 0.2)
        assert bytes(echo.got) == b"before"
        proxy.heal()
        assert len(await reader.readexactly(10_000_000)) == 10_000_000
        (connection,) = proxy.connections
        assert connection.passed == {UP: 10_000_006, DOWN: 10_000_006}
        writer.close()


async def test_faults_of_now_meet_one_connection_or_all(echo: Echo) -> None:
    async with FaultProxy(echo.addr) as proxy:
        ends = [await connected(proxy) for _ in range(3)]
        for reader, writer in ends:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        proxy.connections[1].inflict(Fault(kind=Kind.CUT))
        with pytest.raises(ConnectionResetError):
            await ends[1][0].read()
        ends[0][1].write(b"y")
        assert await ends[0][0].readexactly(1) == b"y"
        proxy.inflict(Fault(kind=Kind.CUT))
        for index in (0, 2):
            with pytest.raises(ConnectionResetError):
                await ends[index][0].read()
        for _, writer in ends:
            writer.close()

        async def gone() -> bool:
            return proxy.connections == []

        await until(gone, "no connection left")


async def test_a_server_that_is_not_there_is_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with FaultProxy(f"127.0.0.1:{port}") as proxy:
        assert await received(proxy, b"x") == (b"", "reset")


async def test_nothing_is_left_after_the_stop(echo: Echo) -> None:
    before = asyncio.all_tasks()
    stall = Fault(kind=Kind.STALL, seconds=math.inf)
    async with FaultProxy(echo.addr, lambda _: [stall]) as proxy:
        reader, writer = await connected(proxy)
        writer.write(b"x")

        async def accepted() -> bool:
            return len(proxy.connections) == 1

        await until(accepted, "the connection")
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    assert {task for task in asyncio.all_tasks() - before if "Echo" not in repr(task)} == set()


def test_it_runs_in_a_thread_for_code_without_a_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"
        with FaultProxy(target).run_in_thread() as proxy:
            host, _, port = proxy.addr.rpartition(":")
            with socket.create_connection((host, int(port)), SOON_S) as client:
                client.sendall(b"hello")
                far, _ = server.accept()
                with far:
                    assert far.recv(5, socket.MSG_WAITALL) == b"hello"
                    proxy.inflict(Fault(kind=Kind.CUT))
                    with pytest.raises(ConnectionResetError):
                        client.recv(1)


def test_a_proxy_that_is_not_started_says_so() -> None:
    with pytest.raises(ClientStateError, match="start"):
        FaultProxy("127.0.0.1:1").inflict(Fault(kind=Kind.CUT))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Kind.CUT, "after", -1),
        (Kind.DELAY, "seconds", -0.1),
        (Kind.DELAY, "seconds", math.nan),
        (Kind.STALL, "seconds", 0.0),  # this is also the default
        (Kind.SPLIT, "size", 0),
        (Kind.CUT, "directions", ()),
    ],
)
def test_a_fault_that_means_nothing_is_refused(kind: Kind, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"Fault.{field}"):
        Fault(kind=kind, **{field: value})  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_faults_of_all_kinds() -> None:
    first, again, other = random_faults(7), random_faults(7), random_faults(8)
    of_all = [first(number) for number in range(400)]
    assert of_all == [again(number) for number in range(400)]
    assert of_all != [other(number) for number in range(400)]
    faults = [fault for faults in of_all for fault in faults]
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.directions for fault in faults} == {(UP, DOWN), (UP,), (DOWN,)}
    assert 100 < sum(1 for faults in of_all if not faults) < 300
    assert sum(1 for fault in faults if fault.after < 100) > len(faults) // 4
