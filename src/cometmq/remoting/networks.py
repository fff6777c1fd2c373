"""Hosts whose connections are made in memory instead of by sockets: how tests run servers and clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

MakeProtocol = Callable[[], asyncio.BufferedProtocol]


class Network(Protocol):
    """Makes and accepts the connections of a host. Both methods are called in a running loop."""

    def connect(self, make: MakeProtocol, port: int) -> asyncio.BufferedProtocol:
        """What `make` made, connected. Raises ConnectionRefusedError if nobody listens."""
        ...

    def listen(self, make: MakeProtocol, port: int) -> tuple[int, Callable[[], None]]:
        """(port, what ends it); port 0 takes a free one. Raises OSError if the port is taken."""
        ...


_networks: dict[str, Network] = {}


def network_of(host: str) -> Network | None:
    """The network that serves a host; None: sockets do."""
    return _networks.get(host)


@contextmanager
def serving(host: str, network: Network) -> Iterator[None]:
    """While the block runs, all connections of this process to and at `host` are this network's."""
    _networks[host] = network
    try:
        yield
    finally:
        del _networks[host]
