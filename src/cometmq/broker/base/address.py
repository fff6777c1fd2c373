"""Where a broker is reached."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.base.config import BrokerConfig
from cometmq.protocol.ids import pack_host

HA_OFFSET = 1
"""From listenPort to the port where slaves connect, unless haListenPort is set."""


@dataclass(eq=False)
class BrokerAddress:
    """The addresses of a broker; the ports are known once it listens. ip: the numeric address of brokerIP1.

    Records and answers have room for numbers only; clients and name servers are told the name of brokerIP1.
    """

    config: BrokerConfig
    ip: str
    port: int = 0
    ha_port: int = 0

    @property
    def interface(self) -> str:
        """The interface to listen on: all of them unless one is set."""
        return self.config.bind_address or ("::" if ":" in self.ip else "0.0.0.0")

    @property
    def text(self) -> str:
        """ "host:port", as the name servers know it."""
        return host_port(self.config.broker_ip1, self.port)

    @property
    def ha_text(self) -> str:
        """ "host:port" for slaves."""
        return host_port(
            self.config.broker_ip2 or self.config.broker_ip1, self.ha_port or self.port + HA_OFFSET
        )

    @property
    def packed(self) -> bytes:
        """8 or 20 bytes, as in records."""
        return pack_host(host_port(self.ip, self.port))


def host_port(host: str, port: int) -> str:
    """ "host:port", IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
