"""The name server's settings, with RocketMQ's names and Apache's defaults."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from cometmq import settings
from cometmq.errors import ConfigError
from cometmq.metrics import MetricsSettings
from cometmq.namesrv.kv import write_file
from cometmq.settings import FIXED, INT_MAX, Inert, Range, SettingsFile

# Settings of Apache's name server, with their defaults, that are accepted but have no effect here: they
# configure threads and buffers, and this server is a single event loop that opens no connections (useTLS).
WITHOUT_USE = {
    "rocketmqHome": "", "productEnvName": "center", "serverWorkerThreads": "8",
    "serverCallbackExecutorThreads": "0", "serverSelectorThreads": "3", "serverOnewaySemaphoreValue": "256",
    "serverAsyncSemaphoreValue": "64", "serverSocketSndBufSize": "0", "serverSocketRcvBufSize": "0",
    "writeBufferHighWaterMark": "0", "writeBufferLowWaterMark": "0", "serverSocketBacklog": "1024",
    "serverPooledByteBufAllocatorEnable": "true", "useEpollNativeSelector": "false",
    "clientRequestThreadPoolNums": "8", "defaultThreadPoolNums": "16",
    "clientRequestThreadPoolQueueCapacity": "50000", "defaultThreadPoolQueueCapacity": "10000",
    "unRegisterBrokerQueueCapacity": "3000", "waitSecondsForService": "45", "useTLS": "false",
}  # fmt: skip
# Optional modes of Apache's name server that are not implemented here, with their defaults.
NOT_BUILT = {
    "clusterTest": "false",
    "supportActingMaster": "false",
    "notifyMinBrokerIdChanged": "false",
    "enableControllerInNamesrv": "false",
    "needWaitForService": "false",
}
INERT = Inert(WITHOUT_USE, NOT_BUILT)


def home_file(name: str) -> str:
    """Return the path of a file in the directory of Apache's name server, ~/namesrv."""
    return os.path.join(os.path.expanduser("~"), "namesrv", name)


class NamesrvConfig(MetricsSettings, kw_only=True, rename="camel"):
    """The settings of a name server. Times are in milliseconds unless the field's name has another unit.

    `others` holds the settings that have no effect in this name server, as values by key.
    """

    listen_port: Annotated[int, Range(0, 65_535, "a port (0: any free one)"), FIXED] = 9876
    bind_address: Annotated[str, FIXED] = "0.0.0.0"
    kv_config_path: Annotated[str, FIXED] = msgspec.field(default_factory=lambda: home_file("kvConfig.json"))
    config_store_path: Annotated[str, FIXED] = msgspec.field(
        default_factory=lambda: home_file("namesrv.properties")
    )
    order_message_enable: bool = False
    return_order_topic_config_to_broker: bool = True
    scan_not_active_broker_interval: Annotated[int, Range(10, INT_MAX, "milliseconds")] = 10_000
    delete_topic_with_broker_registration: bool = False
    enable_all_topic_list: bool = True
    enable_topic_list: bool = True
    config_black_list: Annotated[str, FIXED] = "configBlackList;configStorePath;kvConfigPath"
    server_channel_max_idle_time_seconds: Annotated[int, Range(1, INT_MAX, "seconds")] = 120
    tls_config_file: Annotated[str, FIXED] = msgspec.field(default="", name="tls.config.file")
    tls_server_mode: Annotated[str, FIXED] = msgspec.field(default="", name="tls.server.mode")
    log_level: str = ""  # CometMQ's own setting; RocketMQ has no setting for the log level
    others: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> NamesrvConfig:
        """Create the settings from a properties file's pairs. Raises ConfigError.

        An unknown key is kept in `others` and logged as a warning that names the most similar known key.
        """
        return cls().updated(properties)

    def updated(self, properties: Mapping[str, str]) -> NamesrvConfig:
        """Return the settings with `properties` applied. Raises ConfigError for an invalid value."""
        changes: dict[str, object] = {}
        others = dict(self.others)
        for key, text in properties.items():
            field = FIELDS.get(key)
            if field is not None:
                changes[field] = settings.read_value(key, text, type(getattr(self, field)))
                continue
            if key not in INERT.defaults and key not in others:
                settings.warn_unknown(key, (*FIELDS, *INERT.defaults))
            others[key] = text
        INERT.check({key: text for key, text in properties.items() if key not in FIELDS})
        config: NamesrvConfig = msgspec.structs.replace(self, others=others, **changes)
        config.check()
        return config

    def check(self) -> None:
        """Check ranges, addresses, paths and log levels. Raises ConfigError for an invalid value."""
        settings.check_ranges(RANGES, lambda key: int(getattr(self, FIELDS[key])))
        if self.bind_address:
            settings.check_host("bindAddress", self.bind_address)
        self.check_metrics()
        settings.check_levels(self.log_level)
        for key in ("kvConfigPath", "configStorePath"):
            if not getattr(self, FIELDS[key]):
                raise ConfigError(key, "", "the path of a file")

    def to_properties(self) -> dict[str, str]:
        """Return all settings as strings, keyed by their RocketMQ names."""
        own = {key: settings.show_value(getattr(self, field)) for key, field in FIELDS.items()}
        return {**INERT.defaults, **own, **self.others}

    def black_listed(self, key: str) -> bool:
        """Return whether UPDATE_NAMESRV_CONFIG must refuse to change `key`."""
        return key in NEVER_BY_REQUEST or key in self.config_black_list.split(";")


FIELDS = {
    field.encode_name: field.name for field in msgspec.structs.fields(NamesrvConfig) if field.name != "others"
}
RANGES = settings.annotations_of(NamesrvConfig, Range)
NEVER_BY_REQUEST = settings.keys_with(FIXED, NamesrvConfig) | {"rocketmqHome"}
"""Settings that no request may change, whatever configBlackList contains: paths, addresses, ports."""


class RunningConfig:
    """The settings of a running name server. Each change replaces the object `now`."""

    def __init__(self, config: NamesrvConfig) -> None:
        self.now = config
        self._file = SettingsFile(write_file)

    async def save(self, keys: Iterable[str]) -> None:
        """Write changed settings to the file named by configStorePath. Raises OSError."""
        await self._file.save(self.now.config_store_path, keys, lambda: self.now.to_properties())
