"""Requests that one end of a connection in memory passes to the other without encoding them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.kit.waiting import until

from cometmq.errors import CommandError, RemotingError, RequestTimeout, SendFailed
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import OffsetResponseHeader
from cometmq.remoting import Connection, Dispatcher, Limits, RemotingServer

HEADER = OffsetResponseHeader(7)


class Waiter:
    """A waiter that keeps what it receives."""

    def __init__(self) -> None:
        self.found: list[Frame | RemotingError] = []
        self.set_result: Callable[[Frame], None] = self.found.append
        self.set_exception: Callable[[RemotingError], None] = self.found.append

    def done(self) -> bool:
        return False


@asynccontextmanager
async def link() -> AsyncIterator[Connection]:
    """Connect to a server whose requests 1 to 4 are answered, refused, answered later, and never answered."""

    def refuse(_connection: Connection, _frame: Frame) -> Frame:
        raise CommandError(17, "no")

    async def later(_connection: Connection, frame: Frame) -> Frame:
        await asyncio.sleep(0)
        return frame.response(body=frame.body)

    server = RemotingServer(
        {
            1: lambda connection, frame: frame.response(header=HEADER, body=connection.peer.encode()),
            2: refuse,
            3: later,
            4: lambda _connection, _frame: None,
        }
    )
    client = Connection(Dispatcher({}).__call__, server.tick, Limits())
    server.connect_in_memory(client, ("192.0.2.1", 5))
    yield client
    await server.stop()


async def test_the_response_arrives_before_the_call_returns() -> None:
    async with link() as client:
        waiter = Waiter()
        client.ask(Frame.request(1), 30, waiter)
        (response,) = waiter.found
        assert isinstance(response, Frame)
        assert response.typed is HEADER
        assert response.body == b"192.0.2.1:5"
        assert client.outstanding == 0


async def test_refusals_and_later_responses_arrive_too() -> None:
    async with link() as client:
        waiter = Waiter()
        client.ask(Frame.request(2), 30, waiter)
        client.ask(Frame.request(3, body=b"body"), 30, waiter)
        refused, answered = await until(lambda: waiter.found if len(waiter.found) == 2 else None)
        assert isinstance(refused, Frame)
        assert isinstance(answered, Frame)
        assert (refused.code, refused.remark) == (17, "no")
        assert (answered.code, answered.body) == (0, b"body")


async def test_a_request_above_the_limit_of_handlers_waits_until_another_one_is_done() -> None:
    gates: list[asyncio.Event] = []

    async def wait(_connection: Connection, frame: Frame) -> Frame:
        gates.append(asyncio.Event())
        await gates[-1].wait()
        return frame.response(body=frame.body)

    server = RemotingServer({1: wait}, limits=Limits(handlers=2))
    client = Connection(Dispatcher({}).__call__, server.tick, Limits())
    server.connect_in_memory(client, ("192.0.2.1", 5))
    waiter = Waiter()
    for number in range(5):
        client.ask(Frame.request(1, body=b"%d" % number), 30, waiter)
    await until(lambda: len(gates) == 2)
    partner = client.partner
    assert partner is not None
    assert partner.working == 2

    for number in range(5):
        await until(lambda number=number: len(gates) > number)
        assert len(gates) <= number + 2
        gates[number].set()
        await until(lambda number=number: len(waiter.found) == number + 1)
    assert [each.body for each in waiter.found if isinstance(each, Frame)] == [b"0", b"1", b"2", b"3", b"4"]
    await server.stop()


async def test_encoded_requests_get_responses_as_well() -> None:
    async with link() as client:
        response = await client.call(Frame.request(1), 30)
        assert response.header(OffsetResponseHeader).offset == 7


async def test_the_timeout_and_the_end_of_the_connection() -> None:
    async with link() as client:
        waiter = Waiter()
        client.ask(Frame.request(4), 0.01, waiter)
        await until(lambda: waiter.found)
        client.ask(Frame.request(4), 30, waiter)
        client.close()
        await until(lambda: len(waiter.found) == 2)
        assert [type(each) for each in waiter.found] == [RequestTimeout, SendFailed]
        with pytest.raises(SendFailed):
            client.ask(Frame.request(1), 30, waiter)


async def test_requests_keep_the_other_end_from_being_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with link() as client:
        partner = client.partner
        assert partner is not None
        now = asyncio.get_running_loop().time()
        idle_s = Limits().idle_s
        for number in range(1, 4):
            client.ask(Frame.request(1), 30, Waiter())
            partner.check(now + 0.9 * idle_s * number)
        assert not partner.closed
        partner.check(now + 0.9 * idle_s * 4 + idle_s)
        assert partner.closed


async def test_a_connection_over_a_socket_has_no_other_end() -> None:
    client = Connection(Dispatcher({}).__call__, RemotingServer({}).tick, Limits())
    with pytest.raises(SendFailed):
        client.ask(Frame.request(1), 30, Waiter())
