"""Queries an HTTP address server for name servers (docs/reference/client.md, Name servers)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from cometmq import logs
from cometmq.errors import ConnectError
from cometmq.periodic import Periodic
from cometmq.protocol.addresses import parse_address
from cometmq.remoting.dialing import dial
from cometmq.text import printable, seconds

if TYPE_CHECKING:
    from http.client import HTTPResponse

log = logs.logger(__name__)

DEFAULT_DOMAIN = "jmenv.tbsite.net"
DEFAULT_SUB_GROUP = "nsaddr"

_EVERY_S = 120.0
_AT_FIRST_S = 10.0
"""The interval between queries, in seconds, until the address server has answered one successfully."""
_LIMIT_S = 3.0
_MAX_ANSWER_BYTES = 64 << 10
"""The maximum size of a response in bytes."""
_MAX_ADDRESSES = 64


class _NotHttp(Exception):
    """The bytes received so far are not a complete HTTP response."""


class AddressServer:
    """Queries an address server (8080 is its default port) for the name servers of a unit periodically.

    Its methods must run in the event loop. `found` receives each list of addresses, which is never empty.
    """

    def __init__(
        self, domain: str, sub_group: str, unit: str | None, found: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._addr = domain if ":" in domain else f"{domain}:8080"
        self._path = f"/rocketmq/{sub_group}" + (f"-{unit}?nofix=1" if unit else "")
        self.url = f"http://{self._addr}{self._path}"
        self._found = found
        self._answered = False
        self._problem = ""
        self._rounds = Periodic(
            asyncio.get_running_loop(),
            lambda: _EVERY_S if self._answered else _AT_FIRST_S,
            self._round,
            name=f"name servers from {self.url}",
        )

    async def start(self) -> None:
        """Query the address server now, and then periodically. Raises ConnectError if the first one fails."""
        self._rounds.start()
        await self._request_addresses()

    async def stop(self) -> None:
        await self._rounds.stop(cancel=True)

    async def _round(self) -> None:
        try:
            await self._request_addresses()
        except ConnectError as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.warning("the name server addresses stay unchanged: %s", error)

    async def _request_addresses(self) -> None:
        addrs = await self._fetch()
        self._answered, self._problem = True, ""
        self._found(addrs)

    async def _fetch(self) -> tuple[str, ...]:
        parsed = parse_address(self._addr)
        if parsed is None:
            raise self._failed("the address server must be given as host or host:port")
        try:
            async with asyncio.timeout(_LIMIT_S):
                answer = await _get(*parsed, self._path)
        except TimeoutError:
            raise self._failed(f"no answer within {seconds(_LIMIT_S)}") from None
        except (OSError, UnicodeError) as error:
            raise self._failed(str(error)) from None
        if len(answer) > _MAX_ANSWER_BYTES:
            raise self._failed(f"the answer of the address server has more than {_MAX_ANSWER_BYTES} bytes")
        try:
            response, body = _parsed(answer)
        except _NotHttp as error:
            raise self._failed(f"the answer of the address server is not HTTP: {error}") from None
        if response.status != 200:
            raise self._failed(f"the address server answered {response.status} {response.reason}")
        first_line = body.decode("utf-8", "replace").strip().partition("\n")[0].strip()
        addrs = tuple(dict.fromkeys(part.strip() for part in first_line.split(";") if part.strip()))
        bad = next((addr for addr in addrs if parse_address(addr) is None), None)
        if not addrs or bad is not None:
            raise self._failed(f"the answer has no host:port: {first_line if bad is None else bad!r}")
        if len(addrs) > _MAX_ADDRESSES:
            raise self._failed(f"the answer lists more than {_MAX_ADDRESSES} name servers: {len(addrs)}")
        return addrs

    def _failed(self, problem: str) -> ConnectError:
        return ConnectError(self.url, printable(problem, 300))


async def _get(host: str, port: int, path: str) -> bytes:
    """Return the response to an HTTP request, up to its end or, if it is too long, its beginning."""
    reader = asyncio.StreamReader()
    transport, protocol = await dial(lambda: asyncio.StreamReaderProtocol(reader), host, port)
    writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
    try:
        named = f"[{host}]" if ":" in host else host
        writer.write(f"GET {path} HTTP/1.0\r\nHost: {named}:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) <= _MAX_ANSWER_BYTES and (piece := await reader.read(_MAX_ANSWER_BYTES)):
            answer += piece
            if _is_whole(answer):
                break
        return answer
    finally:
        writer.close()


def _is_whole(answer: bytes) -> bool:
    """Return whether a response is complete. That is known if it states its length or is chunked."""
    try:
        response, _ = _parsed(answer)
    except _NotHttp:
        return False
    return response.chunked or response.length is not None


def _parsed(answer: bytes) -> tuple[HTTPResponse, bytes]:
    """Return the parsed HTTP response and its body. Raises _NotHttp if it is invalid or incomplete."""
    # Imported here, because this module loads the package `email`, which few starts need.
    from http.client import HTTPException, HTTPResponse

    try:
        received = SimpleNamespace(makefile=lambda _mode: BytesIO(answer))  # Like a socket
        response = HTTPResponse(cast(Any, received))
        response.begin()
        return response, response.read()
    except (HTTPException, ValueError, ArithmeticError, OSError) as error:
        raise _NotHttp(repr(error)) from None
