"""The broker's settings, under RocketMQ's names (storage.md 11.2).

A properties file mixes broker, store and network settings, as Apache's broker.conf does:
`BrokerConfig.from_properties` takes what is the broker's and hands the rest to `StoreConfig`. A known key
with a bad value is a ConfigError; an unknown key is kept, shown by GET_BROKER_CONFIG, and warned about with
the nearest known name.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

from cometmq import logs
from cometmq.broker.delay import DelayLevels
from cometmq.broker.inert import INERT_DEFAULTS, check_inert
from cometmq.errors import ConfigError
from cometmq.store.config import SLAVE, StoreConfig

log = logs.logger(__name__)

# Fields whose wire name is not the camel case of the Python name.
SPECIAL_NAMES = {"broker_ip1": "brokerIP1", "broker_ip2": "brokerIP2"}
# What UPDATE_BROKER_CONFIG refuses (configBlackList of Apache's broker).
LIVE_BLACK_LIST = frozenset({"configBlackList", "brokerConfigPath"})
BOOLEANS = {"true": True, "false": False}


def host_name() -> str:
    """This machine's name, the default broker name."""
    return socket.gethostname() or "DEFAULT_BROKER"


def local_address() -> str:
    """The address other machines reach this one at, as far as the routing table knows; 127.0.0.1 without a
    network.
    """
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("192.0.2.1", 9))  # a documentation address: no packet is sent by a datagram connect
        return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    finally:
        probe.close()


class BrokerConfig(msgspec.Struct, kw_only=True):
    """Settings with RocketMQ's defaults; times in ms. Mutable: UPDATE_BROKER_CONFIG changes a running
    broker's.
    """

    broker_name: str = msgspec.field(default_factory=host_name)
    broker_cluster_name: str = "DefaultCluster"
    broker_id: int = 0
    broker_ip1: str = msgspec.field(default_factory=local_address)
    broker_ip2: str = ""
    listen_port: int = 10911
    bind_address: str = ""  # ours: the interface to listen on, empty for all
    vip_channel_enable: bool = True  # ours: whether P-2 is opened
    namesrv_addr: str = msgspec.field(default_factory=lambda: os.environ.get("NAMESRV_ADDR", ""))
    broker_permission: int = 6
    default_topic_queue_nums: int = 8
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    cluster_topic_enable: bool = True
    broker_topic_enable: bool = True
    trace_topic_enable: bool = False
    flush_consumer_offset_interval: int = 5_000
    long_polling_enable: bool = True
    short_polling_time_mills: int = 1_000
    notify_consumer_ids_changed_enable: bool = True
    slave_read_enable: bool = False
    start_accept_send_request_time_stamp: int = 0
    register_name_server_period: int = 30_000
    register_broker_timeout_mills: int = 6_000
    compressed_register: bool = False
    flush_delay_offset_interval: int = 10_000
    trace_on: bool = True
    region_id: str = "DefaultRegion"
    broker_config_path: str = ""
    extra: dict[str, str] = {}
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> BrokerConfig:
        """Read a properties file's pairs. Raises ConfigError(key, value, expected)."""
        own: dict[str, Any] = {}
        store: dict[str, str] = {}
        extra: dict[str, str] = {}
        for key, text in properties.items():
            field = FIELD_OF_KEY.get(key)
            if field is not None:
                own[field] = parse_value(key, text, FIELD_TYPES[field])
            if key in STORE_KEYS:
                store[key] = text
            elif field is None:
                extra[key] = text
                warn_unknown(key)
        check_inert(extra)
        config = cls(**own, extra=extra, store=StoreConfig.from_properties(store))
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError for values that cannot work whatever the type says."""
        if not 0 <= self.listen_port <= 65_535:
            raise ConfigError("listenPort", str(self.listen_port), "a port, 0 to 65535 (0: any free one)")
        if self.broker_id < 0:
            raise ConfigError(
                "brokerId", str(self.broker_id), "0 for a master, a positive number for a slave"
            )
        if self.store.broker_role == SLAVE and self.broker_id == 0:
            raise ConfigError("brokerId", "0", "a positive number, for brokerRole=SLAVE")
        if not 0 <= self.broker_permission <= 7:
            raise ConfigError("brokerPermission", str(self.broker_permission), "2 write, 4 read, 6 both")
        DelayLevels.of(self.store)
        if not self.broker_name.strip():
            raise ConfigError("brokerName", self.broker_name, "a name that is not blank")

    def properties(self) -> dict[str, str]:
        """Every setting as RocketMQ's key and text, store settings and unknown keys included."""
        pairs = {key: render(getattr(self, field)) for key, field in FIELD_OF_KEY.items()}
        pairs.update(self.store.to_properties())
        pairs.update({key: self.extra.get(key, default) for key, default in INERT_DEFAULTS.items()})
        pairs.update(self.extra)
        return pairs

    def update(self, properties: Mapping[str, str]) -> list[str]:
        """Apply settings to a running broker; returns the keys that were known. Raises ConfigError, then
        nothing has changed."""
        own = {key: text for key, text in properties.items() if key in FIELD_OF_KEY}
        store = {key: text for key, text in properties.items() if key in STORE_KEYS}
        values = {
            FIELD_OF_KEY[key]: parse_value(key, text, FIELD_TYPES[FIELD_OF_KEY[key]])
            for key, text in own.items()
        }
        new_store = (
            StoreConfig.from_properties({**self.store.to_properties(), **store}) if store else self.store
        )
        trial = msgspec.structs.replace(self, **values, store=new_store)
        trial.check()
        inert = {key: text for key, text in properties.items() if key in INERT_DEFAULTS}
        check_inert(inert)
        for field, value in values.items():
            setattr(self, field, value)
        self.store = new_store
        self.extra = {**self.extra, **inert}
        return [*own, *store, *inert]

    @property
    def register_period_ms(self) -> int:
        """registerNameServerPeriod, clamped as Apache's broker clamps it."""
        return max(10_000, min(self.register_name_server_period, 60_000))

    @property
    def namesrv_addresses(self) -> list[str]:
        """The name servers of `namesrvAddr`, which separates them by `;`."""
        return [word.strip() for word in self.namesrv_addr.replace(",", ";").split(";") if word.strip()]


def camel(field: str) -> str:
    """RocketMQ's key of a Python field."""
    head, *rest = field.split("_")
    return SPECIAL_NAMES.get(field) or head + "".join(word.capitalize() for word in rest)


FIELD_TYPES: dict[str, type] = {
    field.name: field.type
    for field in msgspec.structs.fields(BrokerConfig)
    if field.name not in {"extra", "store"} and isinstance(field.type, type)
}
FIELD_OF_KEY = {camel(field): field for field in FIELD_TYPES}
STORE_KEYS = frozenset(StoreConfig().to_properties())
KNOWN_KEYS = frozenset({*FIELD_OF_KEY, *STORE_KEYS, *INERT_DEFAULTS})


def parse_value(key: str, text: str, kind: type) -> Any:
    """A setting's text as its type. Raises ConfigError."""
    text = text.strip()
    if kind is bool:
        value = BOOLEANS.get(text.lower())
        if value is None:
            raise ConfigError(key, text, "true or false")
        return value
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(key, text, "a whole number") from None
    return text


def render(value: Any) -> str:
    """A value as properties text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def warn_unknown(key: str) -> None:
    """Say that a key means nothing to us, and what it may have meant."""
    if key in INERT_DEFAULTS:
        return
    near = difflib.get_close_matches(key, KNOWN_KEYS, n=1, cutoff=0.7)
    log.warning("unknown setting %s%s", key, f" (did you mean {near[0]}?)" if near else "")
