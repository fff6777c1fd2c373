"""The addresses of other brokers' endpoints, which name servers and raft groups do not know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from cometmq.errors import ConnectError
from cometmq.protocol.codes import RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.java_properties import parse_properties
from cometmq.remoting import RemotingClient, parse_addr

KNOWN_S = 10.0
"""The time, in seconds, for which the port of another broker is used again."""
MAX_KNOWN = 1_000


@dataclass(eq=False)
class Endpoints:
    """Finds the endpoints of other brokers: at their hosts, and at the port of their settings.

    Attributes:
        client: Asks other brokers for their settings.
        own_port: Returns the port of this broker's endpoint. It is used for a broker that refuses to answer.
    """

    client: RemotingClient
    own_port: Callable[[], int]
    _known: dict[str, tuple[float, int]] = field(default_factory=dict)

    async def find(self, broker_addr: str) -> tuple[str, int]:
        """Return the host and port of a broker's endpoint. Raises CometError."""
        host, _ = parse_addr(broker_addr)
        now = asyncio.get_running_loop().time()
        since, port = self._known.get(broker_addr, (0.0, 0))
        if not port or now - since > KNOWN_S:
            port = await self._port_of(broker_addr)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[broker_addr] = now, port
        return host, port

    async def _port_of(self, broker_addr: str) -> int:
        answer = await self.client.call(broker_addr, Frame.request(RequestCode.GET_BROKER_CONFIG))
        if answer.code != ResponseCode.SUCCESS:
            return self.own_port()
        text = parse_properties(bytes(answer.body).decode("utf-8", "replace")).get("grpcPort", "")
        if not text.isdecimal():
            raise ConnectError(broker_addr, "this broker has no endpoint for 5.x clients: set its grpcPort")
        return int(text) or self.own_port()
