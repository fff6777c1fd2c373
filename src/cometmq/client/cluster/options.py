"""What can be set on a client instance. Times are seconds; defaults are RocketMQ's."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cometmq.client.cluster.ranges import SOME_TIME, check_range, check_ranges
from cometmq.client.cluster.telemetry import Telemetry
from cometmq.errors import ConfigError
from cometmq.protocol.acl import Credentials, credentials_of
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, TRACE_TOPIC, is_legal_name
from cometmq.remoting import DEFAULT_SUB_GROUP, client_tls
from cometmq.settings import BOOLEANS

__all__ = [
    "ADDRESS_MAP_ENV",
    "CREDENTIALS_ENV",
    "TLS_ENV",
    "ClientOptions",
    "TraceOptions",
    "environment_address_map",
    "environment_credentials",
    "environment_tls",
    "namesrv_addresses",
]


CREDENTIALS_ENV = ("COMETMQ_ACCESS_KEY", "COMETMQ_SECRET_KEY", "COMETMQ_SECURITY_TOKEN")
TLS_ENV = "COMETMQ_TLS"
ADDRESS_MAP_ENV = "COMETMQ_ADDRESS_MAP"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Message traces: a note of each send and of each call of a listener, in a topic of their own."""

    topic: str = TRACE_TOPIC
    sampling: float = 1.0
    """The share of messages that are traced, 0 to 1. Clients with the same share choose the same messages, by
    their ids."""

    def __post_init__(self) -> None:
        if not is_legal_name(self.topic, MAX_TOPIC_LENGTH):
            raise ConfigError("trace.topic", self.topic, "the name of a topic")
        check_range("trace.sampling", self.sampling, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Of a ClientInstance: connections, routes and heartbeats that producers and consumers may share."""

    client_ip: str | None = None
    """Part of client and message ids; None: the address of this machine towards the name server."""
    instance_name: str | None = None
    """None: unique per instance (process id and a clock); DEFAULT for broadcasting consumers, whose offsets
    lie in a local file under this name: give each of several on one machine a name of its own."""
    unit_name: str | None = None
    namespace: str | None = None
    """Names of topics and groups are those of this namespace, `namespace%name`, without the program seeing
    it; None: MQ_INST_<word>_<word> if the name server's host name begins with that, else none."""
    namespace_v2: str | None = None
    """5.x's namespace: a field of each request, which proxies understand."""
    namesrv_domain: str | None = None
    """Host, or host:port, of an HTTP address server that is asked for the name servers where neither the code
    nor NAMESRV_ADDR names any."""
    namesrv_domain_sub_group: str = DEFAULT_SUB_GROUP
    address_map: Mapping[str, str] | None = None
    """What is connected in the place of an address that brokers or name servers have in their own network,
    `{"172.18.0.3:10911": "127.0.0.1:20911"}`, or all ports of a host `{"172.18.0.3": "db.example"}`. None:
    COMETMQ_ADDRESS_MAP of the environment, `172.18.0.3:10911=127.0.0.1:20911;…`, if it is there."""
    vip_channel: bool = False
    """Send to the port two below a broker's (vipChannelEnabled), which old clusters keep for sends."""
    route_interval_s: float = 30.0
    heartbeat_interval_s: float = 30.0
    api_timeout_s: float = 3.0
    """Limit of every request that has no limit of its own."""
    access_key: str | None = None
    """With `secret_key`: the account that signs every request to a broker. None: COMETMQ_ACCESS_KEY,
    COMETMQ_SECRET_KEY and COMETMQ_SECURITY_TOKEN of the environment, if they are there; "": requests are not
    signed."""
    secret_key: str | None = field(default=None, repr=False)
    security_token: str | None = field(default=None, repr=False)
    """Of temporary accounts of cloud services: sent and signed too."""
    sign_to_name_servers: bool = False
    """Sign requests to name servers too, as RocketMQ's clients do: cloud services and proxies in their place
    ask for it. A signature does not say which request it is of: a name server can use one for another with
    the same fields, as the deletion of a topic whose route an admin has asked for."""
    tls: ssl.SSLContext | str | bool | None = None
    """A context, or the path of RocketMQ's file of settings (tls.client.*); True: servers have certificates
    that this machine trusts; False: connections are plain; None: COMETMQ_TLS of the environment."""
    trace: TraceOptions | None = None
    """How the messages of these producers and consumers are traced; None: they are not."""
    telemetry: Telemetry | None = None
    """OpenTelemetry's spans of sends and of handled messages; None: there are none."""

    def __post_init__(self) -> None:
        domain = self.namesrv_domain
        if domain is not None and parse_address(domain if ":" in domain else f"{domain}:8080") is None:
            raise ConfigError("namesrv_domain", domain, "a host, or host:port")
        for key, name in (("namespace", self.namespace), ("namespace_v2", self.namespace_v2)):
            if name and (not is_legal_name(name, MAX_TOPIC_LENGTH) or "%" in name or "|" in name):
                raise ConfigError(key, name, "letters, digits, _ and -")
        times = ("route_interval_s", "heartbeat_interval_s", "api_timeout_s")
        check_ranges(self, dict.fromkeys(times, SOME_TIME))
        _ = self.credentials
        for name, place in (self.address_map or {}).items():
            if not _can_stand_for(name, place):
                raise ConfigError("address_map", f"{name}={place}", "host:port=host:port, or host=host")

    @property
    def credentials(self) -> Credentials | None:
        """What requests are signed with. Raises ConfigError for half of it."""
        given = self.access_key, self.secret_key, self.security_token
        return environment_credentials() if given == (None, None, None) else credentials_of(*given)

    @property
    def addresses(self) -> Mapping[str, str]:
        """What is connected in the place of an address. Raises ConfigError."""
        return environment_address_map() if self.address_map is None else self.address_map

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """For TLS connections; reads files. Raises ConfigError."""
        return client_tls(environment_tls() if self.tls is None else self.tls)


def _can_stand_for(name: str, place: str) -> bool:
    both = (name, place)
    alone = not any(":" in each for each in both)
    return all(parse_address(f"{each}:1" if alone else each) is not None for each in both)


def environment_address_map() -> dict[str, str]:
    """What COMETMQ_ADDRESS_MAP says. Raises ConfigError."""
    text = os.environ.get(ADDRESS_MAP_ENV, "")
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, place = (side.strip() for side in part.partition("="))
        if not _can_stand_for(name, place):
            raise ConfigError(ADDRESS_MAP_ENV, part, "host:port=host:port, or host=host")
        found[name] = place
    return found


def environment_credentials() -> Credentials | None:
    """The account that the environment names. Raises ConfigError for half of one."""
    return credentials_of(*(os.environ.get(name) for name in CREDENTIALS_ENV))


def environment_tls() -> str | bool:
    """What COMETMQ_TLS says: `true`, the path of a file of settings, or nothing."""
    text = os.environ.get(TLS_ENV, "")
    return BOOLEANS.get(text.lower(), text or False)


def namesrv_addresses(
    namesrv: str | Sequence[str] | None, namesrv_domain: str | None = None
) -> tuple[str, ...]:
    """`host:port` of every name server: the argument, else NAMESRV_ADDR, else the local default port.

    Text may hold several addresses divided by `;` or `,`. None with namesrv_domain and nothing before that:
    the address server knows them.
    """
    given = namesrv if namesrv is not None else os.environ.get("NAMESRV_ADDR")
    if not given and namesrv is None:
        if namesrv_domain is not None:
            return ()
        given = "127.0.0.1:9876"
    assert given is not None
    parts = given.replace(",", ";").split(";") if isinstance(given, str) else list(given)
    addresses = tuple(dict.fromkeys(part.strip().rpartition("/")[2] for part in parts if part.strip()))
    for address in addresses:
        if parse_address(address) is None:
            raise ConfigError("namesrv", address, "host:port, several divided by ';'")
    if not addresses:
        raise ConfigError("namesrv", str(namesrv), "host:port, several divided by ';'")
    return addresses
