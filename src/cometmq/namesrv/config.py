"""The name server's settings, under RocketMQ's names; defaults are Apache's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import msgspec

from cometmq.errors import ConfigError
from cometmq.metrics import METRICS_RANGES, MetricsSettings
from cometmq.namesrv.kv import write_file
from cometmq.protocol.java_properties import format_properties
from cometmq.settings import (
    INT_MAX,
    Inert,
    Range,
    check_host,
    check_levels,
    check_ranges,
    read_value,
    show_value,
    warn_unknown,
)

# Settings of Apache's name server that have no counterpart in one event loop, with its defaults.
WITHOUT_USE = {
    "rocketmqHome": "",
    "productEnvName": "center",
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
    "waitSecondsForService": "45",
    "useTLS": "false",  # it calls nobody
}
# Modes of Apache's name server that this one does not have.
NOT_BUILT = {
    "clusterTest": "false",
    "supportActingMaster": "false",
    "notifyMinBrokerIdChanged": "false",
    "enableControllerInNamesrv": "false",
    "needWaitForService": "false",
}
INERT = Inert(WITHOUT_USE, NOT_BUILT)
# Never changed while running, whatever configBlackList says: paths, addresses, ports.
ALWAYS_BLACK = frozenset(
    {
        "configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome", "listenPort", "bindAddress",
        "metricsExporterType", "metricsPromExporterHost", "metricsPromExporterPort",
        "metricsGrpcExporterTarget",
        "tls.config.file", "tls.server.mode",
    }
)  # fmt: skip
RANGES: dict[str, Range] = {
    **METRICS_RANGES,
    "listenPort": Range(0, 65_535, "a port (0: any free one)"),
    "scanNotActiveBrokerInterval": Range(10, INT_MAX, "milliseconds"),
    "serverChannelMaxIdleTimeSeconds": Range(1, INT_MAX, "seconds"),
}


def home_file(name: str) -> str:
    """Where Apache's name server keeps its files: ~/namesrv."""
    return os.path.join(os.path.expanduser("~"), "namesrv", name)


class NamesrvConfig(MetricsSettings, kw_only=True, rename="camel"):
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
    tls_config_file: str = msgspec.field(default="", name="tls.config.file")
    tls_server_mode: str = msgspec.field(default="", name="tls.server.mode")
    log_level: str = ""  # ours
    others: dict[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> NamesrvConfig:
        """Read a properties file's pairs. A known key with a bad value is a ConfigError; an unknown key is
        kept, with a warning that names the nearest known one."""
        return cls().updated(properties)

    def updated(self, properties: Mapping[str, str]) -> NamesrvConfig:
        """This configuration with `properties` over it. Raises ConfigError(key, value, expected)."""
        changes: dict[str, object] = {}
        others = dict(self.others)
        for key, text in properties.items():
            field = FIELDS.get(key)
            if field is not None:
                changes[field] = read_value(key, text, type(getattr(self, field)))
                continue
            if key not in INERT.defaults and key not in others:
                warn_unknown(key, (*FIELDS, *INERT.defaults))
            others[key] = text
        INERT.check({key: text for key, text in properties.items() if key not in FIELDS})
        config: NamesrvConfig = msgspec.structs.replace(self, others=others, **changes)
        config.check()
        return config

    def check(self) -> None:
        """Raises ConfigError for values that cannot work whatever the type says."""
        check_ranges(RANGES, lambda key: int(getattr(self, FIELDS[key])))
        if self.bind_address:
            check_host("bindAddress", self.bind_address)
        self.check_metrics()
        check_levels(self.log_level)
        for key in ("kvConfigPath", "configStorePath"):
            if not getattr(self, FIELDS[key]):
                raise ConfigError(key, "", "the path of a file")

    def to_properties(self) -> dict[str, str]:
        """Every setting under its RocketMQ name, as GET_NAMESRV_CONFIG shows them."""
        own = {key: show_value(getattr(self, field)) for key, field in FIELDS.items()}
        return {**INERT.defaults, **own, **self.others}

    def black_listed(self, key: str) -> bool:
        """Whether UPDATE_NAMESRV_CONFIG must refuse to change `key`."""
        return key in ALWAYS_BLACK or key in self.config_black_list.split(";")


FIELDS = {
    field.encode_name: field.name for field in msgspec.structs.fields(NamesrvConfig) if field.name != "others"
}


class RunningConfig:
    """The settings of a running name server; `now` is replaced when a request changes them. Ports and paths
    stay in force until the next start."""

    def __init__(self, config: NamesrvConfig) -> None:
        self.now = config
        self._lock = asyncio.Lock()

    def update(self, properties: Mapping[str, str]) -> None:
        """Put these over the others. Raises ConfigError; then nothing has changed."""
        self.now = self.now.updated(properties)

    async def save(self) -> None:
        """Write the settings to configStorePath. Raises OSError."""
        async with self._lock:
            content = format_properties(self.now.to_properties()).encode()
            await asyncio.to_thread(write_file, self.now.config_store_path, content)
