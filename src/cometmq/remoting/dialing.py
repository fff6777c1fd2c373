"""The opening of connections to a host name, whose addresses are tried in parallel (RFC 8305)."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain, zip_longest
from typing import Any, TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)

_STAGGER_S = 0.25
"""Seconds after the start of one attempt until the next address is tried in parallel."""
_MAX_ADDRESSES = 16

Info = tuple[Any, ...]
"""One result of getaddrinfo: (family, type, proto, canonical name, address)."""


async def dial(
    make: Callable[[], P], host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect to the first address of a host that accepts the connection. The caller limits the time.

    `make` creates the protocol. With `tls`, the server's certificate must name `host`.

    Raises:
        OSError: No address accepts the connection: the error of the first failed attempt is raised. Or the
            host or port is impossible, such as a port above 65535 or a host label of over 63 characters.
    """
    try:
        return await _dial(make, host, port, tls)
    except (ValueError, OverflowError) as error:  # Raised for an invalid host name or port
        if isinstance(error, OSError):  # Such as a certificate error, which is a ValueError, too
            raise
        raise OSError(f"{host}:{port} is not an address: {error}") from error


async def _dial(
    make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None
) -> tuple[asyncio.Transport, P]:
    loop = asyncio.get_running_loop()
    name = host if tls is not None else None
    if not _is_literal(host):
        infos = await addresses_of(host, port)
        if len(infos) > 1:
            winner = await _first_connected(_families_in_turn(infos))
            try:
                return await loop.create_connection(make, sock=winner, ssl=tls, server_hostname=name)
            except BaseException:
                winner.close()
                raise
    return await loop.create_connection(make, host, port, ssl=tls, server_hostname=name)


def _is_literal(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host.partition("%")[0])
        return True
    return False


async def addresses_of(host: str, port: int) -> Sequence[Info]:
    """Return the addresses of a host. Raises OSError."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


def _families_in_turn(infos: Sequence[Info]) -> list[Info]:
    """Order addresses so that IPv4 and IPv6 alternate, because one family may not work on this machine."""
    first = [info for info in infos if info[0] == infos[0][0]]
    others = [info for info in infos if info[0] != infos[0][0]]
    pairs = chain.from_iterable(zip_longest(first, others))
    return [info for info in pairs if info is not None][:_MAX_ADDRESSES]


async def _first_connected(infos: Sequence[Info]) -> socket.socket:
    """Try these addresses in order, and return the first socket that is connected.

    The next address is tried `_STAGGER_S` seconds after the previous one, or as soon as an attempt fails.
    """
    left = list(infos)
    running: set[asyncio.Task[socket.socket]] = set()
    failures: list[OSError] = []
    try:
        while left or running:
            if left:
                running.add(asyncio.create_task(_connected(left.pop(0))))
            pause_s = _STAGGER_S if left else None
            done, _ = await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                running.discard(task)
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                failures.append(error)
        raise failures[0]
    finally:
        _close(running)


async def _connected(info: Info) -> socket.socket:
    family, kind, proto, _, address = info
    made = socket.socket(family, kind, proto)
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


def _close(tasks: set[asyncio.Task[socket.socket]]) -> None:
    """Cancel the attempts that are not needed, and close the sockets of those that have connected.

    The function awaits nothing. Otherwise a cancellation of its caller at that point would lose the
    connection that the caller is about to return.
    """
    for task in tasks:
        if not task.done():
            task.cancel()  # A cancelled connection attempt closes its own socket
        elif task.exception() is None:
            task.result().close()
