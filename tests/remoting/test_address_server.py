"""Name servers from an HTTP address server: its valid and odd responses, and the clients that use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import pytest
from tests.kit.brokers import running
from tests.kit.fakes import FakeBroker, FakeNamesrv
from tests.kit.waiting import until

from cometmq import ClientInstance, ClientOptions, Message, Producer
from cometmq.errors import ConfigError, ConnectError
from cometmq.namesrv.config import NamesrvConfig
from cometmq.namesrv.server import NameServer
from cometmq.remoting import AddressServer, address_server

OK = b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n"


class Pages:
    """An HTTP server with scripted responses."""

    def __init__(self) -> None:
        self.answer = OK
        self.asked: list[str] = []
        self.waits = asyncio.Event()
        self.waits.set()
        self.piece = 1 << 20
        """Bytes per write."""
        self.keeps_open = False
        self.serving = 0
        self.addr = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.addr = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waits.set()
        self._server.close()
        await until(lambda: not self.serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head.split()[1].decode())
            await self.waits.wait()
            for begin in range(0, len(self.answer), self.piece):
                writer.write(self.answer[begin : begin + self.piece])
                await writer.drain()
                await asyncio.sleep(0)
            if self.keeps_open:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client closed the connection early
        writer.close()
        self.serving -= 1


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    async with Pages() as server:
        yield server


@pytest.fixture
async def namesrv() -> AsyncIterator[FakeNamesrv]:
    """A name server with the route of topic T."""
    async with FakeBroker() as broker, FakeNamesrv() as server:
        server.serve("T", broker)
        yield server


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    server = NameServer(NamesrvConfig.from_properties({"listenPort": "0", "bindAddress": "127.0.0.1"}))
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_server, "_EVERY_S", 0.02)
    monkeypatch.setattr(address_server, "_AT_FIRST_S", 0.02)


async def ask(pages: Pages, sub_group: str = "nsaddr", unit: str | None = None) -> tuple[str, ...]:
    found: list[tuple[str, ...]] = []
    server = AddressServer(pages.addr, sub_group, unit, found.append)
    try:
        await server.start()
    finally:
        await server.stop()
    return found[0]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (OK + b"10.0.0.1:9876", ("10.0.0.1:9876",)),
        (OK + b" 10.0.0.1:9876 ; ns-2.example:9876;\r\nmore\r\n", ("10.0.0.1:9876", "ns-2.example:9876")),
        (OK + b"\n\n[fd00::1]:9876\n", ("[fd00::1]:9876",)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\na:9876 is cut", ("a:9876",)),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\na:9876\r\n0\r\n\r\n", ("a:9876",)),
    ],
)
async def test_the_first_line_names_the_servers(pages: Pages, answer: bytes, wanted: tuple[str, ...]) -> None:
    pages.answer = answer
    assert await ask(pages) == wanted
    assert pages.asked == ["/rocketmq/nsaddr"]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\na:9876",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\na:9876\r\n0\r\n\r\n",
    ],
)
async def test_a_server_that_keeps_the_connection_open(pages: Pages, answer: bytes, piece: int) -> None:
    pages.answer, pages.piece, pages.keeps_open = answer, piece, True
    assert await ask(pages) == ("a:9876",)


async def test_an_answer_that_does_not_end_has_its_time(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_server, "_LIMIT_S", 0.1)
    pages.answer, pages.keeps_open = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\na:9876", True
    with pytest.raises(ConnectError, match="no answer within"):
        await ask(pages)


async def test_a_unit_has_name_servers_of_its_own(pages: Pages) -> None:
    pages.answer = OK + b"a:1"
    await ask(pages, "mine", "unit1")
    assert pages.asked == ["/rocketmq/mine-unit1?nofix=1"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\na:1", "404 Not Found"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://x/\r\n\r\n", "302"),
        (OK, "no host:port: ''"),
        (OK + b"<html>", "no host:port: '<html>'"),
        (OK + b"a:1;b", "no host:port: 'b'"),
        (b"not HTTP at all\r\n\r\n", "not HTTP"),
        (b"", "not HTTP"),
        (OK + b";".join(b"a:%d" % (n + 1) for n in range(65)), "lists more than 64 name servers: 65"),
        (OK + b"x" * 100_000, "more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\na:1", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 23 + b"\r\n\r\na:1", "not HTTP"),
    ],
)
async def test_odd_answers_are_refused_by_name(pages: Pages, answer: bytes, words: str) -> None:
    pages.answer = answer
    with pytest.raises(ConnectError) as caught:
        await ask(pages)
    assert words in str(caught.value)
    assert caught.value.addr == f"http://{pages.addr}/rocketmq/nsaddr"


async def test_a_silent_server_and_none_at_all(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_server, "_LIMIT_S", 0.05)
    pages.waits.clear()
    with pytest.raises(ConnectError, match="no answer within"):
        await ask(pages)
    pages.addr = "127.0.0.1:1"
    with pytest.raises(ConnectError, match="cannot connect to http"):
        await ask(pages)


# -- clients


@pytest.mark.usefixtures("often")
async def test_a_client_follows_the_address_server(
    pages: Pages, namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    pages.answer = OK + namesrv.addr.encode()
    options = ClientOptions(namesrv_domain=pages.addr, namesrv_domain_sub_group="mine", unit_name="u")
    async with Producer("p", client_options=options) as producer:
        await producer.send(Message("T", b"x"))
        assert producer.client.namesrv.addrs == (namesrv.addr,)
        other = f"127.0.0.1:1;{namesrv.addr}"
        pages.answer = OK + other.encode()
        await until(lambda: len(producer.client.namesrv.addrs) == 2)
        assert producer.client.namesrv.current == namesrv.addr  # the address is still listed
        pages.answer = b"HTTP/1.1 500 Oh no\r\n\r\n"
        before = len(pages.asked)
        await until(lambda: len(pages.asked) > before + 2)
        assert len(producer.client.namesrv.addrs) == 2
        pages.answer = OK + b"127.0.0.1:2"
        await until(lambda: producer.client.namesrv.addrs == ("127.0.0.1:2",))
        assert producer.client.namesrv.current == "127.0.0.1:2"
    assert set(pages.asked) == {"/rocketmq/mine-u?nofix=1"}


async def test_code_and_environment_come_before_the_address_server(
    pages: Pages, namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ClientOptions(namesrv_domain=pages.addr)
    async with ClientInstance(namesrv.addr, options) as client:
        assert client.namesrv.addrs == (namesrv.addr,)
    monkeypatch.setenv("NAMESRV_ADDR", namesrv.addr)
    async with ClientInstance(None, options) as client:
        assert client.namesrv.addrs == (namesrv.addr,)
    assert pages.asked == []


async def test_two_that_share_a_client_start_at_once(
    pages: Pages, namesrv: FakeNamesrv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    pages.answer = OK + namesrv.addr.encode()
    client = ClientInstance(None, ClientOptions(namesrv_domain=pages.addr))
    producers = [Producer(group, client=client) for group in "ab"]
    await asyncio.gather(*(producer.start() for producer in producers))
    await asyncio.gather(*(producer.send(Message("T", b"x")) for producer in producers))
    await asyncio.gather(*(producer.stop() for producer in producers))
    await client.stop()


async def test_a_client_does_not_start_without_name_servers(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    pages.answer = OK + b"nonsense"
    with pytest.raises(ConnectError, match="no host:port"):
        async with Producer("p", client_options=ClientOptions(namesrv_domain=pages.addr)):
            pass
    with pytest.raises(ConfigError, match="namesrv_domain"):
        ClientOptions(namesrv_domain="no host")


# -- brokers


@pytest.mark.usefixtures("often")
async def test_a_broker_registers_with_what_the_address_server_names(tmp_path: object, pages: Pages) -> None:
    async with name_server() as first, name_server() as second:
        one, two = f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"
        pages.answer = b"HTTP/1.1 503 Not yet\r\n\r\n"
        settings = {
            "fetchNamesrvAddrByAddressServer": "true",
            "rmqAddressServerDomain": pages.addr,
            "rmqAddressServerSubGroup": "mine",
        }
        async with running(tmp_path, **settings):
            assert not first.tables.live()
            pages.answer = OK + one.encode()
            await until(first.tables.live)
            assert not second.tables.live()
            pages.answer = OK + f"{one};{two}".encode()
            await until(second.tables.live)
        assert set(pages.asked) == {"/rocketmq/mine"}
