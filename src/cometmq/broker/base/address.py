"""The addresses of a broker."""

from __future__ import annotations

from dataclasses import dataclass

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.members import peers_of
from cometmq.protocol.ids import pack_host
from cometmq.store import SLAVE

HA_OFFSET = 1
"""The offset from listenPort to the port where slaves connect, unless haListenPort is set."""


def ha_port_of(config: BrokerConfig) -> int:
    """Return the port where slaves connect; 0 (any free port) if the system chose the broker's own port."""
    return config.ha_listen_port or (config.listen_port and config.listen_port + HA_OFFSET)


def ports_of(config: BrokerConfig) -> list[tuple[str, str, int]]:
    """Return the setting's key, the interface and the port for each socket on which a broker listens.

    The port of old clients, `listenPort` - 2, is omitted, because a broker can work without it.
    """
    interface, store = config.bind_address or "0.0.0.0", config.store
    ports = [("listenPort", interface, config.listen_port)]
    if store.enable_d_leger_commit_log:
        _, _, port = dict(peers_of(store.d_leger_peers)).get(store.d_leger_self_id, "").rpartition(":")
        ports.append(("dLegerPeers", interface, int(port or 0)))
    elif store.broker_role != SLAVE:
        ports.append(("haListenPort", interface, ha_port_of(config)))
    return ports + config.metrics_ports(interface)


@dataclass(eq=False)
class BrokerAddress:
    """The addresses of a broker. The ports are known once the broker listens.

    `ip` is the numeric address of brokerIP1: records and responses have room for numbers only. Clients and
    name servers receive the name in brokerIP1.
    """

    config: BrokerConfig
    ip: str
    port: int = 0
    ha_port: int = 0

    @property
    def interface(self) -> str:
        """The interface to listen on; all interfaces unless one is set."""
        return self.config.bind_address or ("::" if ":" in self.ip else "0.0.0.0")

    @property
    def text(self) -> str:
        """The address "host:port" that the broker registers."""
        return host_port(self.config.broker_ip1, self.port)

    @property
    def ha_text(self) -> str:
        """The address "host:port" for slaves."""
        return host_port(
            self.config.broker_ip2 or self.config.broker_ip1, self.ha_port or self.port + HA_OFFSET
        )

    @property
    def packed(self) -> bytes:
        """The broker's address in the form of records, 8 or 20 bytes."""
        return pack_host(host_port(self.ip, self.port))


def host_port(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
