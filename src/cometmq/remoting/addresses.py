"""Addresses in settings: resolution of host names, and ports to listen on. Errors name the setting."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

from cometmq.errors import ConfigError
from cometmq.remoting.server import RemotingServer

RESOLVE_S = 10.0
"""The timeout, in seconds, for the resolution of a name by the operating system."""


async def resolve(key: str, host: str, timeout_s: float = RESOLVE_S) -> str:
    """Return the numeric address, preferably IPv4, of a host in the setting `key`. Raises ConfigError."""
    lookup = asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(lookup, timeout_s)
    except TimeoutError:
        raise ConfigError(key, host, f"a name that this machine resolves within {timeout_s:g} s") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(key, host, f"an address, or a name that this machine resolves ({reason})") from None
    by_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in by_family:
            return by_family[family]
    raise ConfigError(key, host, "a name that has an IP address")


async def listen(server: RemotingServer, host: str, port: int) -> int:
    """Let a server listen on `bindAddress` and `listenPort`. Return the port. Raises ConfigError."""
    if host:
        await resolve("bindAddress", host)
    try:
        return await server.start(host, port)
    except OSError as error:
        # From Python 3.13 on, asyncio skips unavailable addresses. If no address is left, asyncio raises an
        # OSError without an errno.
        if error.errno in (errno.EADDRNOTAVAIL, None):
            raise ConfigError("bindAddress", host, "an address of this machine") from error
        raise port_error("listenPort", port, error) from error


def port_error(key: str, port: int, error: OSError) -> ConfigError:
    """Return the ConfigError for the port in the setting `key`, on which listening failed with `error`."""
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else str(error)
    return ConfigError(key, str(port), f"a port that can be listened on ({reason})")


def check_port(key: str, interface: str, port: int) -> None:
    """Raise ConfigError, with the setting `key`, if no server can listen on a port now. Port 0 passes."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((interface, port))
            probe.listen(1)
        except OSError as error:
            raise port_error(key, port, error) from error
