"""The addresses and ports of a broker."""

from __future__ import annotations

import msgspec

from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.members import peers_of
from cometmq.protocol.ids import pack_host
from cometmq.store import SLAVE

HA_OFFSET = 1
"""The HA port, to which slaves connect, is `listenPort` plus this number unless `haListenPort` is set."""


def ha_port_of(config: BrokerConfig) -> int:
    """Return the port to which slaves connect. It is 0 (any free one) if a `listenPort` of 0 decides it."""
    return config.ha_listen_port or (config.listen_port and config.listen_port + HA_OFFSET)


def ports_of(config: BrokerConfig) -> list[tuple[str, str, int]]:
    """Return the sockets on which a broker listens, each as a setting's key, interface and port.

    The port `listenPort` - 2 for old clients is omitted, because a broker can work without it.
    """
    interface, store = config.bind_address or "0.0.0.0", config.store
    ports = [("listenPort", interface, config.listen_port)]
    if store.enable_d_leger_commit_log:
        _, _, port = dict(peers_of(store.d_leger_peers)).get(store.d_leger_self_id, "").rpartition(":")
        ports.append(("dLegerPeers", interface, int(port or 0)))
    elif store.broker_role != SLAVE:
        ports.append(("haListenPort", interface, ha_port_of(config)))
    return ports + config.metrics_ports(interface)


class BrokerAddress(msgspec.Struct, eq=False):
    """The addresses of a broker. The ports are known only once the broker listens.

    `ip` is the numeric form of `brokerIP1`, for records and message ids, which have no room for a host name.
    Clients and name servers receive `brokerIP1` itself.
    """

    config: BrokerConfig
    ip: str
    port: int = 0
    ha_port: int = 0

    @property
    def interface(self) -> str:
        """The interface to listen on: `bindAddress`, or all interfaces if it is not set."""
        return self.config.bind_address or ("::" if ":" in self.ip else "0.0.0.0")

    @property
    def text(self) -> str:
        """The address "host:port" that the broker registers with the name servers."""
        return host_port(self.config.broker_ip1, self.port)

    @property
    def ha_text(self) -> str:
        """The address "host:port" to which slaves connect."""
        return host_port(
            self.config.broker_ip2 or self.config.broker_ip1, self.ha_port or self.port + HA_OFFSET
        )

    @property
    def packed(self) -> bytes:
        """The broker's address and port in the binary form of records: 8 bytes for IPv4, 20 for IPv6."""
        return pack_host(host_port(self.ip, self.port))


def host_port(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
