"""The identity of a client: its address, its client id, and the unique keys of its messages."""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import datetime

from cometmq.client.cluster.options import ClientOptions
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.ids import UniqueKeys

_ANYWHERE = "192.0.2.1"
"""An address reserved for documentation. It stands for any remote machine whose address is unknown."""


def local_address(towards: str) -> str:
    """Return the local address from which this machine reaches `host:port`, or 127.0.0.1 if there is none.

    Sends no packet. A host name other than localhost is not resolved: the result is then the local address
    from which this machine reaches the internet.
    """
    host, port = parse_address(towards) or (towards, 9)
    if host == "localhost":
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
    except OSError:
        host, family = _ANYWHERE, socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket determines its local address without sending anything.
            probe.connect((host, port))
            name: str = probe.getsockname()[0]
            return name
    except OSError:
        return "127.0.0.1"


def client_id_of(address: str, options: ClientOptions) -> str:
    """Return `<ip>@<instance>[@<unit>]`. The default instance is `<pid>#<clock>`, unique on this machine."""
    instance = options.instance_name or f"{os.getpid()}#{time.monotonic_ns()}"
    return f"{address}@{instance}" + (f"@{options.unit_name}" if options.unit_name else "")


class KeyMaker:
    """A generator of unique keys for messages. Each key contains the time since the month began."""

    __slots__ = ("_keys",)

    def __init__(self, address: str) -> None:
        try:
            packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
        except OSError:
            packed = b"\x7f\0\0\1"
        this_month, next_month = _month_bounds_ms(time.time())
        # The random number distinguishes clients with the same address and process id, which occur within one
        # process and in containers.
        self._keys = UniqueKeys(packed, os.getpid(), secrets.randbits(32), this_month, next_month)

    def make(self) -> str:
        now_ms = int(time.time() * 1000)
        if now_ms >= self._keys.next_month_ms:
            self._keys.roll(*_month_bounds_ms(now_ms / 1000))
        return self._keys.make(now_ms)


def _month_bounds_ms(now_s: float) -> tuple[int, int]:
    """Return when this month and the next month begin. As in Java, the local time zone applies."""
    now = datetime.fromtimestamp(now_s)
    start = datetime(now.year, now.month, 1)
    after = datetime(now.year + now.month // 12, now.month % 12 + 1, 1)
    return int(start.timestamp() * 1000), int(after.timestamp() * 1000)
