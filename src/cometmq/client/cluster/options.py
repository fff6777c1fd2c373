"""What can be set on a client instance. Times are seconds; defaults are RocketMQ's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from cometmq.client.cluster.ranges import SOME_TIME, check_range, check_ranges
from cometmq.client.cluster.telemetry import Telemetry
from cometmq.errors import ConfigError
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import TOPIC_LENGTH_MAX, TRACE_TOPIC, is_legal_name
from cometmq.remoting import DEFAULT_SUB_GROUP

__all__ = ["ClientOptions", "TraceOptions", "namesrv_addresses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Message traces: a note of each send and of each call of a listener, in a topic of their own."""

    topic: str = TRACE_TOPIC
    sampling: float = 1.0
    """The share of messages that are traced, 0 to 1. Clients with the same share choose the same messages, by
    their ids."""

    def __post_init__(self) -> None:
        if not is_legal_name(self.topic, TOPIC_LENGTH_MAX):
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
    route_interval_s: float = 30.0
    heartbeat_interval_s: float = 30.0
    api_timeout_s: float = 3.0
    """Limit of every request that has no limit of its own."""
    trace: TraceOptions | None = None
    """How the messages of these producers and consumers are traced; None: they are not."""
    telemetry: Telemetry | None = None
    """OpenTelemetry's spans of sends and of handled messages; None: there are none."""

    def __post_init__(self) -> None:
        domain = self.namesrv_domain
        if domain is not None and parse_address(domain if ":" in domain else f"{domain}:8080") is None:
            raise ConfigError("namesrv_domain", domain, "a host, or host:port")
        for key, name in (("namespace", self.namespace), ("namespace_v2", self.namespace_v2)):
            if name and (not is_legal_name(name, TOPIC_LENGTH_MAX) or "%" in name or "|" in name):
                raise ConfigError(key, name, "letters, digits, _ and -")
        times = ("route_interval_s", "heartbeat_interval_s", "api_timeout_s")
        check_ranges(self, dict.fromkeys(times, SOME_TIME))


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
