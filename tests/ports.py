"""Ports for servers that must know their port before the start, or use it again after a restart."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"
FIRST, LAST = 15_000, 32_000
"""Ports above the usual ones of servers and below the kernel's ephemeral range.

The kernel assigns ports of that range (net.ipv4.ip_local_port_range) to other sockets, which could take the
port of a server that is restarting.
"""
WORKERS = 8
STEP = 4
"""A broker at port P also uses P-2 for clients of the VIP channel and P+1 for its slaves."""


def _ports_of_this_process() -> itertools.cycle[int]:
    """Return the ports of this process, which no other process of the test run uses.

    They begin at a random one, since two test runs may run concurrently.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    share = (LAST - FIRST) // WORKERS
    ports = [*range(FIRST + number * share + 2, FIRST + (number + 1) * share - 1, STEP)]
    begin = random.randrange(len(ports))
    return itertools.cycle(ports[begin:] + ports[:begin])


_PORTS = _ports_of_this_process()


def free_port() -> int:
    """Return a port P that is free together with P-2 and P+1, and is not returned again soon."""
    for port in itertools.islice(_PORTS, (LAST - FIRST) // WORKERS // STEP):
        if all(_is_free(each) for each in (port - 2, port, port + 1)):
            return port
    raise AssertionError(f"no three free ports between {FIRST} and {LAST}")


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Give a port that refuses connections. It stays bound meanwhile, so that no other server gets it."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        yield held.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
