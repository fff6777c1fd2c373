"""Hosts with several addresses, some of which refuse connections, drop packets or are invalid."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.ports import closed_port

from cometmq.errors import ConnectError
from cometmq.protocol.frame import Frame
from cometmq.remoting import AddressServer, Limits, RemotingClient, RemotingServer, dialing

HOST = "several.example"


class Addresses:
    """The addresses to which HOST resolves."""

    def __init__(self) -> None:
        self.of_host: list[str] = []
        self._held = ExitStack()

    async def resolve(self, host: str, port: int) -> list[dialing.Info]:
        assert host == HOST
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port))
            for ip in self.of_host
        ]

    def drops_packets(self, ip: str, port: int) -> None:
        """Listen with a full backlog, so that further connection attempts get no response."""
        listener = self._held.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ip, port))
        listener.listen(0)
        for _ in range(4):
            waiting = self._held.enter_context(socket.socket())
            waiting.setblocking(False)
            with suppress(BlockingIOError):
                waiting.connect((ip, port))

    def close(self) -> None:
        self._held.close()


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[Addresses]:
    made = Addresses()
    monkeypatch.setattr(dialing, "addresses_of", made.resolve)
    yield made
    made.close()


async def answer(code: int, addr: str, **limits: float) -> Frame:
    client = RemotingClient(limits=Limits(**limits))  # type: ignore[arg-type]
    try:
        return await client.call(addr, Frame.request(code), 10.0)
    finally:
        await client.close()


@pytest.mark.parametrize("first", ["drops packets", "refuses", "is of a family that does not work"])
async def test_the_next_address_is_tried(first: str, addresses: Addresses) -> None:
    server = RemotingServer({7: lambda _, frame: frame.response(0)})
    port = await server.start("127.0.0.1", 0)
    addresses.of_host = ["100::1" if "family" in first else "127.0.0.2", "127.0.0.1"]
    if first == "drops packets":
        addresses.drops_packets("127.0.0.2", port)
    try:
        assert (await answer(7, f"{HOST}:{port}")).code == 0
    finally:
        await server.stop(0)


async def test_without_an_address_that_accepts_the_first_failure_is_named(addresses: Addresses) -> None:
    with closed_port() as port:
        addresses.of_host = ["127.0.0.1", "127.0.0.1"]
        with pytest.raises(ConnectError, match="Connection refused"):
            await answer(7, f"{HOST}:{port}")


async def test_all_addresses_together_have_one_limit(addresses: Addresses) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
    for number in (2, 3):
        addresses.drops_packets(f"127.0.0.{number}", port)
    addresses.of_host = ["127.0.0.2", "127.0.0.3"]
    with pytest.raises(ConnectError, match=r"no connection within 0\.4 s"):
        await answer(7, f"{HOST}:{port}", connect_timeout_s=0.4)


@pytest.mark.parametrize(
    ("host", "port"),
    [(f"{'x' * 64}.example", 80), ("a..b", 80), ("\udc80", 80), ("127.0.0.1", 70_000)],
)
async def test_what_cannot_be_an_address_is_an_os_error(host: str, port: int) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(OSError) as refused:
            await dialing.dial(asyncio.Protocol, host, port)
    assert not isinstance(refused.value, TimeoutError)


async def test_a_cancellation_while_other_attempts_end_loses_no_connection(
    addresses: Addresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, made = asyncio.Event(), [socket.socket()]

    async def slow(info: dialing.Info) -> socket.socket:
        if info[4][0] == "127.0.0.1":
            made[0].setblocking(False)
            await asyncio.get_running_loop().sock_connect(made[0], info[4])
            return made[0]
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            await asyncio.sleep(0.01)
        raise AssertionError

    monkeypatch.setattr(dialing, "_connected", slow)
    monkeypatch.setattr(dialing, "_STAGGER_S", 0.001)
    server = RemotingServer({})
    port = await server.start("127.0.0.1", 0)
    addresses.of_host = ["127.0.0.2", "127.0.0.1"]
    try:
        attempt = asyncio.create_task(dialing.dial(asyncio.Protocol, HOST, port))
        await ended.wait()
        attempt.cancel()
        with suppress(asyncio.CancelledError):
            (await attempt)[0].abort()
        async with asyncio.timeout(30):
            while made[0].fileno() != -1:
                await asyncio.sleep(0.001)
    finally:
        await server.stop(0)


async def test_an_address_server_is_asked_at_its_next_address(addresses: Addresses) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 14\r\n\r\n10.0.0.1:9876\n")
        writer.close()

    http = await asyncio.start_server(page, "127.0.0.1", 0)
    port = http.sockets[0].getsockname()[1]
    addresses.drops_packets("127.0.0.2", port)
    addresses.of_host = ["127.0.0.2", "127.0.0.1"]
    found: list[tuple[str, ...]] = []
    server = AddressServer(f"{HOST}:{port}", "nsaddr", None, found.append)
    try:
        await server.start()
    finally:
        await server.stop()
        http.close()
    assert found == [("10.0.0.1:9876",)]
