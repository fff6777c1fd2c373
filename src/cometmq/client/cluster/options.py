"""The settings of a client instance. Times are in seconds. The defaults are RocketMQ's."""

from __future__ import annotations

import math
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Annotated, Any, get_args

from cometmq.client.cluster.telemetry import Telemetry
from cometmq.errors import ConfigError
from cometmq.protocol.acl import Credentials, credentials_of
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, TRACE_TOPIC, is_legal_name
from cometmq.remoting import DEFAULT_SUB_GROUP, client_tls
from cometmq.settings import BOOLEANS, environment_namesrv, hints_of

CREDENTIALS_ENV = ("COMETMQ_ACCESS_KEY", "COMETMQ_SECRET_KEY", "COMETMQ_SECURITY_TOKEN")
TLS_ENV = "COMETMQ_TLS"
ADDRESS_MAP_ENV = "COMETMQ_ADDRESS_MAP"


SOME_TIME = (0.001, math.inf)
"""The permitted range of an interval or a timeout in seconds. Zero would never pause, or always expire."""


def check_range(key: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise ConfigError if the value is no number from `low` to `high`, an int if `low` is an int."""
    kind = int if isinstance(low, int) else int | float
    if not isinstance(value, kind) or not low <= value <= high:
        bounds = f"{low} or more" if high == math.inf else f"{low} to {high}"
        raise ConfigError(key, repr(value), bounds if kind is not int else f"{bounds}, a whole number")


def check_ranges(options: Any) -> None:
    """Check each field that is annotated with a range, as `Annotated[int, (1, 1024)]`. Some may be None."""
    kind: type = type(options)
    for key, hint in hints_of(kind).items():
        value, (type_, *others) = getattr(options, key), get_args(hint) or (hint,)
        may_be_none = NoneType in get_args(type_)
        for each in others:
            if isinstance(each, tuple) and not (may_be_none and value is None):
                check_range(key, value, *each)


def check_choice(key: str, value: object, choices: type[Enum]) -> None:
    """Raise ConfigError unless the value is a member of the enum, not the name or value of one."""
    if not isinstance(value, choices):
        names = ", ".join(f"{choices.__name__}.{each.name}" for each in choices)
        raise ConfigError(key, repr(value), names)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The settings of message traces: records of sends and of listener calls in a topic of their own.

    Attributes:
        topic: The trace topic.
        sampling: The share of traced messages, 0 to 1. It depends on the message ids, so that clients with
            the same share trace the same messages.
    """

    topic: str = TRACE_TOPIC
    sampling: float = 1.0

    def __post_init__(self) -> None:
        if not is_legal_name(self.topic, MAX_TOPIC_LENGTH):
            raise ConfigError("trace.topic", self.topic, "the name of a topic")
        check_range("trace.sampling", self.sampling, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The settings of a ClientInstance: connections, routes and heartbeats, which several clients may share.

    Attributes:
        client_ip: The address in client ids and message ids. None: the address of this machine on the route
            to the name server.
        instance_name: The instance part of the client id. None: for broadcasting consumers `DEFAULT`,
            otherwise a text that is unique per instance (process id and clock). The path of a broadcasting
            consumer's offset file contains this name, so several broadcasting consumers on one machine need
            different names.
        unit_name: The unit part of the client id.
        namespace: The namespace of topics and groups. The client adds it to their names as `namespace%name`
            in requests, and removes it from names in answers. None: MQ_INST_<word>_<word> if the name
            server's host name begins with such a text, otherwise none.
        namespace_v2: The namespace of RocketMQ 5, a field of each request, which proxies read.
        namesrv_domain: The `host` or `host:port` of an HTTP address server. It supplies the name servers if
            neither the code nor the environment names any.
        namesrv_domain_sub_group: The last part of the address server's URL path.
        address_map: The addresses to connect to instead of addresses that are reachable in the brokers' own
            network only: `{"172.18.0.3:10911": "127.0.0.1:20911"}`, or all ports of a host `{"172.18.0.3":
            "db.example"}`. None: the environment variable COMETMQ_ADDRESS_MAP,
            `172.18.0.3:10911=127.0.0.1:20911;…`.
        vip_channel: Send to the broker's port minus two (vipChannelEnabled), which old clusters reserve for
            sends.
        route_interval_s: The interval at which routes are refreshed. Missing topics are asked for sooner.
        heartbeat_interval_s: The interval between heartbeats to the brokers.
        api_timeout_s: The timeout of each request without a timeout of its own.
        access_key: With `secret_key`: the account that signs each request to a broker. None: the environment
            variables COMETMQ_ACCESS_KEY, COMETMQ_SECRET_KEY and COMETMQ_SECURITY_TOKEN. "": requests are not
            signed.
        secret_key: The secret key of the account.
        security_token: The token of a temporary account of a cloud service. The token is sent with each
            request and signed, too.
        sign_to_name_servers: Sign requests to name servers, too, as RocketMQ's clients do and as cloud
            services and proxies require. A signature does not cover the request code: a name server could use
            it for another request with the same fields, such as the deletion of a topic whose route an
            administrator requested.
        tls: A TLS context, or the path of a RocketMQ settings file (tls.client.*). True: servers need
            certificates that this machine trusts. False: no TLS. None: the environment variable COMETMQ_TLS.
        trace: The settings of message traces. None: no traces.
        telemetry: OpenTelemetry spans of sends and of consumed messages. None: no spans.
    """

    client_ip: str | None = None
    instance_name: str | None = None
    unit_name: str | None = None
    namespace: str | None = None
    namespace_v2: str | None = None
    namesrv_domain: str | None = None
    namesrv_domain_sub_group: str = DEFAULT_SUB_GROUP
    address_map: Mapping[str, str] | None = None
    vip_channel: bool = False
    route_interval_s: Annotated[float, SOME_TIME] = 30.0
    heartbeat_interval_s: Annotated[float, SOME_TIME] = 30.0
    api_timeout_s: Annotated[float, SOME_TIME] = 3.0
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    security_token: str | None = field(default=None, repr=False)
    sign_to_name_servers: bool = False
    tls: ssl.SSLContext | str | bool | None = None
    trace: TraceOptions | None = None
    telemetry: Telemetry | None = None

    def __post_init__(self) -> None:
        domain = self.namesrv_domain
        if domain is not None and parse_address(domain if ":" in domain else f"{domain}:8080") is None:
            raise ConfigError("namesrv_domain", domain, "a host, or host:port")
        for key, name in (("namespace", self.namespace), ("namespace_v2", self.namespace_v2)):
            if name and (not is_legal_name(name, MAX_TOPIC_LENGTH) or "%" in name or "|" in name):
                raise ConfigError(key, name, "letters, digits, _ and -")
        check_ranges(self)
        _ = self.credentials
        for name, place in (self.address_map or {}).items():
            if not _can_stand_for(name, place):
                raise ConfigError("address_map", f"{name}={place}", "host:port=host:port, or host=host")

    @property
    def credentials(self) -> Credentials | None:
        """The account that signs requests.

        Raises ConfigError if the access key or the secret key is missing.
        """
        given = self.access_key, self.secret_key, self.security_token
        return environment_credentials() if given == (None, None, None) else credentials_of(*given)

    @property
    def addresses(self) -> Mapping[str, str]:
        """A map from addresses that brokers report to the addresses to connect to. Raises ConfigError."""
        return environment_address_map() if self.address_map is None else self.address_map

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of connections, or None without TLS. Reads files. Raises ConfigError."""
        return client_tls(environment_tls() if self.tls is None else self.tls)


def _can_stand_for(name: str, place: str) -> bool:
    both = (name, place)
    alone = not any(":" in each for each in both)
    return all(parse_address(f"{each}:1" if alone else each) is not None for each in both)


def environment_address_map() -> dict[str, str]:
    """Return the address map in COMETMQ_ADDRESS_MAP. Raises ConfigError if the value is invalid."""
    text = os.environ.get(ADDRESS_MAP_ENV, "")
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, place = (side.strip() for side in part.partition("="))
        if not _can_stand_for(name, place):
            raise ConfigError(ADDRESS_MAP_ENV, part, "host:port=host:port, or host=host")
        found[name] = place
    return found


def environment_credentials() -> Credentials | None:
    """Return the account in COMETMQ_ACCESS_KEY, COMETMQ_SECRET_KEY and COMETMQ_SECURITY_TOKEN, if one is set.

    Raises ConfigError if one of the two keys is missing or too long.
    """
    try:
        return credentials_of(*(os.environ.get(name) for name in CREDENTIALS_ENV))
    except ConfigError as error:
        raise ConfigError(f"COMETMQ_{error.key.upper()}", error.value, error.expected) from None


def environment_tls() -> str | bool:
    """Return the value of COMETMQ_TLS: a boolean or the path of a settings file. Without it, return False."""
    text = os.environ.get(TLS_ENV, "")
    return BOOLEANS.get(text.lower(), text or False)


def namesrv_addresses(
    namesrv: str | Sequence[str] | None, namesrv_domain: str | None = None
) -> tuple[str, ...]:
    """Return `host:port` of each name server, none if an address server supplies them. Raises ConfigError.

    `namesrv` holds addresses, as text separated by `;` or `,`. None: COMETMQ_NAMESRV or NAMESRV_ADDR of the
    environment, otherwise the address server `namesrv_domain`, otherwise 127.0.0.1:9876.
    """
    variable, environment = environment_namesrv()
    given = namesrv if namesrv is not None else environment
    if not given and namesrv is None:
        if namesrv_domain is not None:
            return ()
        given = "127.0.0.1:9876"
    # The command line passes the value of the variable as the argument `namesrv`. So if the two are equal, an
    # error about the value names the environment variable instead of the argument.
    key = variable if environment and given == environment else "namesrv"
    parts = given.replace(",", ";").split(";") if isinstance(given, str) else list(given)
    addresses = tuple(dict.fromkeys(part.strip().rpartition("/")[2] for part in parts if part.strip()))
    for address in addresses:
        if parse_address(address) is None:
            raise ConfigError(key, address, "host:port, several separated by ';'")
    if not addresses:
        raise ConfigError(key, str(given), "host:port, several separated by ';'")
    return addresses
