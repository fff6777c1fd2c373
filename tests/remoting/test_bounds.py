"""Limits of one connection and of all together: incomplete frames and running handlers."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from tests.kit.raw_peer import peer, raw_frame
from tests.kit.waiting import until
from tests.remoting.test_server import ECHO, MIB, SLOW, CountingTransport, echo, serving

from cometmq.protocol.frame import Frame
from cometmq.remoting import Connection, Limits, Tick

GRACE_S = Limits().frame_grace_s


class Cuttable(CountingTransport):
    """A transport that records whether it was aborted."""

    aborted = False
    unsent = 0

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Line:
    """A connection with manual input and a manual clock."""

    def __init__(self, tick: Tick, limits: Limits, *, dialed: bool = False) -> None:
        self.bodies: list[int] = []
        self.connection = Connection(
            lambda _c, request: self.bodies.append(len(request.body)), tick, limits, dialed=dialed
        )
        self.transport = Cuttable()
        self.connection.connection_made(self.transport)
        self.now = asyncio.get_running_loop().time()

    def feed(self, data: bytes) -> None:
        """Deliver bytes from the peer until the connection is closed."""
        view = memoryview(data)
        while view and not self.connection.closed:
            room = self.connection.get_buffer(-1)
            size = min(len(room), len(view))
            room[:size] = view[:size]
            self.connection.buffer_updated(size)
            view = view[size:]

    def wait(self, seconds: float) -> None:
        """Advance the clock, with the check that happens each second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.connection.check(self.now)

    @property
    def kept(self) -> int:
        """Bytes in the connection's buffers."""
        return self.connection.buffered


@pytest.mark.parametrize(
    ("size", "bytes_a_second", "passes"),
    [
        (4 * MIB, 100_000, True),
        (4 * MIB, 40_000, True),
        (16 * MIB - 200, 100_000, True),
        (100_000, 4_000, True),  # within the grace period
        (4 * MIB, 20_000, False),
        (4 * MIB, 1, False),
        (50_000, 1, False),
    ],
)
async def test_a_frame_must_come_at_a_certain_pace(size: int, bytes_a_second: int, passes: bool) -> None:
    line = Line(Tick(), Limits())
    data = raw_frame(ECHO, 1, bytes(size))
    for start in range(0, min(len(data), 200 * bytes_a_second), bytes_a_second):
        line.feed(data[start : start + bytes_a_second])
        line.wait(1)
    assert (line.transport.aborted, line.bodies) == (not passes, [size] if passes else [])
    assert line.kept == 0
    line.connection.connection_lost(None)


async def test_a_byte_now_and_then_does_not_keep_a_connection_that_never_finishes_a_frame() -> None:
    line = Line(Tick(), Limits())
    line.feed(struct.pack(">I", 15 * MIB) + bytes(MIB))
    for _ in range(3):
        line.wait(100)
        line.feed(b"x")
    assert line.transport.aborted
    line.connection.connection_lost(None)


async def test_each_frame_has_a_deadline_of_its_own() -> None:
    """A connection is allowed to have an incomplete frame at all times."""
    line = Line(Tick(), Limits())
    frame = raw_frame(ECHO, 1, bytes(200_000))
    line.feed(frame[:1000])
    for number in range(20):
        line.wait(20)
        line.feed(frame[1000:] + frame[:1000])
        assert len(line.bodies) == number + 1
    assert not line.transport.aborted
    line.connection.connection_lost(None)


async def test_what_is_not_read_because_of_us_is_not_late() -> None:
    line = Line(Tick(), Limits(idle_s=1000))
    line.feed(raw_frame(ECHO, 1, bytes(200_000))[:1000])
    line.connection.pause_writing()
    for unsent in range(100, 0, -1):
        line.transport.unsent = unsent  # the peer reads its responses slowly
        line.wait(1)
    line.connection.resume_writing()
    await asyncio.sleep(0)
    line.wait(GRACE_S)
    assert not line.transport.aborted
    line.wait(3)
    assert line.transport.aborted
    line.connection.connection_lost(None)


@pytest.mark.parametrize("came", [70_000, 100_000, 300_000, MIB, 5 * MIB])
async def test_a_buffer_is_at_most_twice_what_came(came: int) -> None:
    line = Line(Tick(), Limits())
    line.feed(raw_frame(ECHO, 1, bytes(15 * MIB))[:came])
    assert came <= line.kept <= 2 * came + 64 * 1024
    line.connection.connection_lost(None)


async def test_all_half_sent_frames_share_one_budget_and_the_oldest_goes() -> None:
    tick, limits = Tick(), Limits(partial_total=4 * MIB)
    lines = [Line(tick, limits) for _ in range(8)]
    data = raw_frame(ECHO, 1, bytes(MIB))
    for line in lines:
        line.feed(data[:-1])
        assert tick.partial.total == sum(other.kept for other in lines) <= 4 * MIB
    assert [line.transport.aborted for line in lines] == [True] * 5 + [False] * 3
    for line in lines[5:]:
        line.feed(data[-1:])
        assert line.bodies == [MIB]
    assert tick.partial.total == 0
    for line in lines:
        line.connection.connection_lost(None)


async def test_all_unsent_answers_share_one_budget_and_who_has_waited_longest_goes() -> None:
    tick, limits = Tick(), Limits(write_total=4 * MIB)
    lines = [Line(tick, limits) for _ in range(6)]
    for line in lines:
        line.transport.unsent = MIB
        line.connection.pause_writing()
        line.connection.write(b"x")
        line.connection.flush()
    assert [line.transport.aborted for line in lines] == [True] * 2 + [False] * 4
    lines[2].connection.resume_writing()
    lines[3].connection.connection_lost(None)
    lines[4].transport.unsent = 3 * MIB
    lines[4].wait(1)
    assert tick.unsent.total == 4 * MIB
    assert not any(line.transport.aborted for line in lines[2:])
    for line in lines:
        line.connection.connection_lost(None)
    assert tick.unsent.total == 0


async def test_only_a_stall_closes_a_connection_because_of_the_clients_own_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tick, limits = Tick(), Limits(write_evict=MIB, write_total=MIB)
    line = Line(tick, limits, dialed=True)
    line.transport.unsent = 3 * MIB
    line.connection.pause_writing()
    line.connection.write(b"x")
    line.connection.flush()
    line.wait(limits.write_stall_s - 1)
    assert (line.transport.aborted, line.transport.reading, tick.unsent.total) == (False, True, 0)
    line.wait(2)
    assert line.transport.aborted
    assert "it has received none of its requests for 30 s" in caplog.text
    line.connection.connection_lost(None)


async def test_a_connection_that_goes_gives_its_part_of_the_budget_back() -> None:
    tick = Tick()
    lines = [Line(tick, Limits()) for _ in range(3)]
    for line, size in zip(lines, (3, 1000, MIB), strict=True):
        line.feed(raw_frame(ECHO, 1, bytes(2 * MIB))[:size])
    assert tick.partial.total == sum(line.kept for line in lines) > MIB
    for line in lines:
        line.connection.connection_lost(None)
    assert tick.partial.total == 0


class Gate:
    """An asynchronous handler that waits, and counts its running calls."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.running = self.most = 0

    async def __call__(self, connection: Connection, request: Frame) -> Frame:
        self.running += 1
        self.most = max(self.most, self.running)
        await self.open.wait()
        self.running -= 1
        return request.response(0, body=b"%d" % len(request.body))


async def test_beyond_so_many_handlers_a_connection_is_not_read_until_some_are_done() -> None:
    gate = Gate()
    handlers: dict[int, Any] = {SLOW: gate.__call__, ECHO: echo}
    async with (
        serving(handlers, limits=Limits(handlers=8)) as (_, port),
        peer(port) as greedy,
        peer(port) as other,
    ):
        sending = asyncio.create_task(
            greedy.send(b"".join(raw_frame(SLOW, n) + raw_frame(ECHO, 1000 + n) for n in range(100)))
        )
        await until(lambda: gate.running == 8)
        for n in range(20):
            assert (await other.ask(ECHO, n))[0]["opaque"] == n
        assert gate.running == 8
        gate.open.set()
        answers = [(await greedy.read())[0]["opaque"] for _ in range(200)]
        assert sorted(answers) == sorted([*range(100), *range(1000, 1100)])
        assert gate.most == 8
        await sending


async def test_large_bodies_count_for_more_than_one_handler() -> None:
    gate = Gate()
    async with serving({SLOW: gate.__call__}, limits=Limits(handlers=64)) as (_, port), peer(port) as raw:
        sending = asyncio.create_task(
            raw.send(b"".join(raw_frame(SLOW, n, bytes(2 * MIB)) for n in range(8)))
        )
        await until(lambda: gate.running == 2)
        await asyncio.sleep(0.05)
        assert gate.running == 2
        gate.open.set()
        for _ in range(8):
            assert (await raw.read())[1] == b"%d" % (2 * MIB)
        assert gate.most <= 3
        await sending


async def test_a_connection_that_ends_with_handlers_in_flight_leaves_nothing_behind() -> None:
    gate = Gate()
    async with serving({SLOW: gate.__call__}, limits=Limits(handlers=4)) as (server, port):
        async with peer(port) as raw:
            await raw.send(b"".join(raw_frame(SLOW, n) for n in range(20)))
            await until(lambda: gate.running == 4)
            (connection,) = server.connections
        gate.open.set()
        await until(lambda: not server.connections)
        await until(lambda: connection.working == 0)
