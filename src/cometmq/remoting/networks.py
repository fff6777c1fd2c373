"""In-memory networks for tests. Connections to a host that has such a network use no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

MakeProtocol = Callable[[], asyncio.BufferedProtocol]


class Network(Protocol):
    """Opens and accepts the connections of one host. All methods must be called in a running loop."""

    def connect(self, make: MakeProtocol, port: int) -> asyncio.BufferedProtocol:
        """Connect a new protocol, created by `make`, to `port` and return the protocol.

        Raises ConnectionRefusedError if no server listens there.
        """
        ...

    def listen(self, make: MakeProtocol, port: int) -> tuple[int, Callable[[], None]]:
        """Listen on a port; 0 selects a free one. Return the port and a function that stops listening.

        Raises OSError if the port cannot be used.
        """
        ...


_networks: dict[str, Network] = {}


def network_of(host: str) -> Network | None:
    """Return the network in memory that is used for `host`, or None if sockets are used."""
    return _networks.get(host)


@contextmanager
def serving(host: str, network: Network) -> Iterator[None]:
    """During a `with` block, use `network` instead of sockets to connect to `host` and to listen on it."""
    _networks[host] = network
    try:
        yield
    finally:
        del _networks[host]
