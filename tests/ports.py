"""Ports for servers that have to know theirs before they start, or have to have it again after a restart."""

from __future__ import annotations

import itertools
import os
import random
import socket

HOST = "127.0.0.1"
FIRST, LAST = 15_000, 32_000
"""Above the usual ports of servers, and below those that the kernel gives to whoever asks for any port and to
outgoing connections (net.ipv4.ip_local_port_range): these take a port that a server has left for a moment."""
WORKERS = 8
STEP = 4
"""A broker at P has P-2 for clients of the fast channel and P+1 for its slaves."""


def _ports_of_this_process() -> itertools.cycle[int]:
    """Those of the processes of one test run do not meet. They begin anywhere: two runs may go on at once."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    share = (LAST - FIRST) // WORKERS
    ports = [*range(FIRST + number * share + 2, FIRST + (number + 1) * share - 1, STEP)]
    begin = random.randrange(len(ports))
    return itertools.cycle(ports[begin:] + ports[:begin])


_PORTS = _ports_of_this_process()


def free_port() -> int:
    """A port P that nobody has, P-2 and P+1 neither, and that nobody else gets for long."""
    for port in itertools.islice(_PORTS, (LAST - FIRST) // WORKERS // STEP):
        if all(_is_free(each) for each in (port - 2, port, port + 1)):
            return port
    raise AssertionError(f"no three free ports between {FIRST} and {LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
