"""The name server's settings, under RocketMQ's names; defaults are Apache's."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

import msgspec

from cometmq import logs
from cometmq.errors import ConfigError

log = logs.logger(__name__)

# Settings of Apache's name server that have no counterpart in one event loop, or belong to modes
# this one does not have, with its defaults: taken and shown without a word.
INERT_DEFAULTS = {
    "rocketmqHome": "",
    "productEnvName": "center",
    "clusterTest": "false",
    "serverWorkerThreads": "8",
    "serverCallbackExecutorThreads": "0",
    "serverSelectorThreads": "3",
    "serverOnewaySemaphoreValue": "256",
    "serverAsyncSemaphoreValue": "64",
    "serverSocketSndBufSize": "0",
    "serverSocketRcvBufSize": "0",
    "writeBufferHighWaterMark": "0",
    "writeBufferLowWaterMark": "0",
    "serverSocketBacklog": "1024",
    "serverPooledByteBufAllocatorEnable": "true",
    "useEpollNativeSelector": "false",
    "clientRequestThreadPoolNums": "8",
    "defaultThreadPoolNums": "16",
    "clientRequestThreadPoolQueueCapacity": "50000",
    "defaultThreadPoolQueueCapacity": "10000",
    "unRegisterBrokerQueueCapacity": "3000",
    "supportActingMaster": "false",
    "notifyMinBrokerIdChanged": "false",
    "enableControllerInNamesrv": "false",
    "needWaitForService": "false",
    "waitSecondsForService": "45",
    "useTLS": "false",
}
# Never changed while running, whatever configBlackList says.
ALWAYS_BLACK = frozenset({"configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome"})
BOOLEANS = {"true": True, "false": False}


def home_file(name: str) -> str:
    """Where Apache's name server keeps its files: ~/namesrv."""
    return os.path.join(os.path.expanduser("~"), "namesrv", name)


class NamesrvConfig(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Settings; times in ms unless the name says seconds. `others` holds keys that mean nothing here."""

    listen_port: int = 9876
    bind_address: str = "0.0.0.0"
    kv_config_path: str = msgspec.field(default_factory=lambda: home_file("kvConfig.json"))
    config_store_path: str = msgspec.field(default_factory=lambda: home_file("namesrv.properties"))
    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    scan_not_active_broker_interval: int = 10_000
    delete_topic_with_broker_registration: bool = False
    enable_all_topic_list: bool = True
    enable_topic_list: bool = True
    config_black_list: str = "configBlackList;configStorePath;kvConfigPath"
    server_channel_max_idle_time_seconds: int = 120
    others: dict[str, str] = {}

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> NamesrvConfig:
        """Read a properties file's pairs. A known key with a bad value is a ConfigError; an unknown key is
        kept and warned about with the nearest known name.
        """
        return cls().updated(properties)

    def updated(self, properties: Mapping[str, str]) -> NamesrvConfig:
        """This configuration with `properties` over it. Raises ConfigError(key, value, expected)."""
        changes: dict[str, object] = {}
        others = dict(self.others)
        for key, value in properties.items():
            field = FIELDS.get(key)
            if field is not None:
                changes[field] = read_value(key, value.strip(), getattr(self, field))
                continue
            if key not in INERT_DEFAULTS and key not in others:
                warn_unknown(key)
            others[key] = value
        config: NamesrvConfig = msgspec.structs.replace(self, others=others, **changes)
        config.check()
        return config

    def check(self) -> None:
        """Raise ConfigError for a number out of its range."""
        if not 0 <= self.listen_port <= 65535:
            raise ConfigError("listenPort", str(self.listen_port), "a port, 0 to 65535 (0: any free one)")
        if self.scan_not_active_broker_interval < 1:
            raise ConfigError(
                "scanNotActiveBrokerInterval",
                str(self.scan_not_active_broker_interval),
                "milliseconds above 0",
            )
        if self.server_channel_max_idle_time_seconds < 1:
            raise ConfigError(
                "serverChannelMaxIdleTimeSeconds",
                str(self.server_channel_max_idle_time_seconds),
                "seconds above 0",
            )

    def to_properties(self) -> dict[str, str]:
        """Every setting under its RocketMQ name, as GET_NAMESRV_CONFIG shows them."""
        own = {key: show_value(getattr(self, field)) for key, field in FIELDS.items()}
        return {**INERT_DEFAULTS, **own, **self.others}

    def black_listed(self, key: str) -> bool:
        """Whether UPDATE_NAMESRV_CONFIG must refuse to change `key`."""
        return key in ALWAYS_BLACK or key in self.config_black_list.split(";")


FIELDS = {
    field.encode_name: field.name for field in msgspec.structs.fields(NamesrvConfig) if field.name != "others"
}


def read_value(key: str, value: str, like: object) -> object:
    """The text as the type of `like`. Raises ConfigError."""
    if isinstance(like, bool):
        truth = BOOLEANS.get(value.lower())
        if truth is None:
            raise ConfigError(key, value, "true or false")
        return truth
    if isinstance(like, int):
        # int() alone would take "1_000" and digits of other scripts.
        if not value.isascii() or not value.removeprefix("-").isdecimal():
            raise ConfigError(key, value, "a whole number")
        return int(value)
    return value


def show_value(value: object) -> str:
    """A setting as Java prints it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def warn_unknown(key: str) -> None:
    """Tell that a key means nothing here, and which one may have been meant."""
    near = difflib.get_close_matches(key, [*FIELDS, *INERT_DEFAULTS], n=1)
    log.warning("unknown configuration key %s%s", key, f"; did you mean {near[0]}?" if near else "")
