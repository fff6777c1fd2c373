"""The broker's settings, under RocketMQ's names (docs/reference/storage.md, Broker settings).

A properties file contains settings of the broker, the store and the network, as Apache's broker.conf does.
`BrokerConfig.from_properties` parses the broker's own settings and passes the store's to `StoreConfig`. A
known key with an invalid value raises ConfigError. An unknown key is kept, returned by GET_BROKER_CONFIG, and
logged with the most similar known key. Each number is annotated with its range.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from cometmq import logs, settings
from cometmq.broker.base.delay_levels import DelayLevels
from cometmq.broker.base.members import check_member
from cometmq.errors import ConfigError
from cometmq.metrics import MetricsSettings
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.codes import MAX_QUEUES_PER_TOPIC, MAX_TOPIC_LENGTH, TRACE_TOPIC, is_legal_name
from cometmq.remoting import DEFAULT_DOMAIN, DEFAULT_SUB_GROUP
from cometmq.settings import FIXED, INT_MAX, LONG_MAX, START, Inert, Range, environment_namesrv
from cometmq.store import SLAVE, StoreConfig

log = logs.logger(__name__)

MASTER_ID = 0
"""The `brokerId` that every master has."""
MAX_RATE = 10**12
"""The highest rate limit, in messages or bytes per second."""
MAX_PARKED_PULLS = 1 << 20
"""The highest value of the limits on parked pulls, each of which takes about 1 KB of memory."""


_MS = Range(1, INT_MAX, "milliseconds")
_PERIOD = Range(10, INT_MAX, "milliseconds")
_BYTES = Range(0, LONG_MAX, "bytes")
_RATE = Range(0, MAX_RATE, "per second (0: no limit)")
_QUEUES = Range(1, MAX_QUEUES_PER_TOPIC)
_PARKED = Range(1, MAX_PARKED_PULLS)
_KEYS = Range(1, INT_MAX, "keys")
_REPLICAS = Range(1, 32, "replicas, the master included")
_PORT = Range(0, 65_535, "a port (0: any free one)")
_GRPC_PORT = Range(-1, 65_535, "a port (0: any free one, -1: none)")
_HA_PORT = Range(0, 65_535, "a port (0: listenPort + 1)")
_HA_BATCH = Range(1024, 2 << 20, "bytes; slaves of Apache's have buffers of 4 MiB")

# Settings of Apache's broker that are accepted without an effect.
# These settings, with 4.9.7's defaults, control parts of Apache's broker that CometMQ does not have: thread
# pools and their queues, Netty, mapped memory, and the deletion of mapped files (docs/reference/storage.md,
# Broker settings).
WITHOUT_USE = {
    "sendMessageThreadPoolNums": "4", "pullMessageThreadPoolNums": "32", "queryMessageThreadPoolNums": "16",
    "adminBrokerThreadPoolNums": "16", "clientManageThreadPoolNums": "32",
    "consumerManageThreadPoolNums": "32", "heartbeatThreadPoolNums": "8",
    "endTransactionThreadPoolNums": "24", "processReplyMessageThreadPoolNums": "32",
    "putMessageFutureThreadPoolNums": "4", "litePullMessageThreadPoolNums": "32",
    "ackMessageThreadPoolNums": "32", "sendThreadPoolQueueCapacity": "10000",
    "putThreadPoolQueueCapacity": "10000", "pullThreadPoolQueueCapacity": "100000",
    "replyThreadPoolQueueCapacity": "10000", "queryThreadPoolQueueCapacity": "20000",
    "clientManagerThreadPoolQueueCapacity": "1000000", "consumerManagerThreadPoolQueueCapacity": "1000000",
    "heartbeatThreadPoolQueueCapacity": "50000", "endTransactionPoolQueueCapacity": "100000",
    "transferMsgByHeap": "true",
    "serverWorkerThreads": "8",
    "serverCallbackExecutorThreads": "0", "serverSelectorThreads": "3", "serverOnewaySemaphoreValue": "256",
    "serverAsyncSemaphoreValue": "64", "serverSocketSndBufSize": "0", "serverSocketRcvBufSize": "0",
    "serverPooledByteBufAllocatorEnable": "true", "useEpollNativeSelector": "false",
    "clientWorkerThreads": "4", "clientCloseSocketIfTimeout": "false", "highSpeedMode": "false",
    "commercialEnable": "true", "commercialBigCount": "1", "commercialTimerCount": "1",
    "commercialTransCount": "1", "commercialBaseCount": "1",
    "skipUncommittedMessage": "false", "forceRegister": "true",
    "flushConsumerOffsetHistoryInterval": "60000", "flushConsumeQueueLeastPages": "2",
    "useReentrantLockWhenPutMessage": "true", "transientStorePoolEnable": "false",
    "transientStorePoolSize": "5", "fastFailIfNoBufferInStorePool": "false", "warmMapedFileEnable": "false",
    "flushLeastPagesWhenWarmMapedFile": "4096", "commitIntervalCommitLog": "200",
    "commitCommitLogLeastPages": "4", "commitCommitLogThoroughInterval": "200",
    "destroyMapedFileIntervalForcibly": "120000", "redeleteHangedFileInterval": "120000",
    "diskFallRecorded": "true", "mappedFileSizeConsumeQueueExt": "50331648",
    "bitMapLengthConsumeQueueExt": "64",
    "enableScheduleAsyncDeliver": "false", "scheduleAsyncDeliverMaxPendingLimit": "2000",
    "scheduleAsyncDeliverMaxResendNum2Blocked": "3", "debugLockEnable": "false",
    "putMsgIndexHightWater": "600000", "expectConsumerNumUseFilter": "32",
    "maxErrorRateOfBloomFilter": "20", "filterDataCleanTimeSpan": "86400000",
    "autoDeleteUnusedStats": "false",
    # Release 5.x of Apache's broker has added the following settings.
    "waitTimeMillsInAckQueue": "3000", "waitTimeMillsInAdminBrokerQueue": "5000",
    "timerRollWindowSlot": "172800", "timerFlushIntervalMs": "1000", "mappedFileSizeTimerLog": "104857600",
    "appendTopicForTimerDeleteKey": "false",
    "transactionOpMsgMaxSize": "4096", "transactionOpBatchInterval": "3000",
}  # fmt: skip

NOT_BUILT = {
    "enableConsumeQueueExt": "false", "duplicationEnable": "false",
    "enableLmq": "false", "enableMultiDispatch": "false", "messageStorePlugIn": "",
    "enableCalcFilterBitMap": "false", "filterSupportRetry": "false",
    "timerPrecisionMs": "1000", "timerCongestNumEachSlot": "2147483647",
}  # fmt: skip

INERT = Inert(WITHOUT_USE, NOT_BUILT)
WITHOUT_EFFECT = frozenset({*INERT.defaults, "enableBatchPush"})


def host_name() -> str:
    """Return this machine's host name, which is the default broker name."""
    return socket.gethostname() or "DEFAULT_BROKER"


def local_address() -> str:
    """Return the address from which this machine sends to other networks, or 127.0.0.1 without a network."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        probe.connect(("192.0.2.1", 9))  # 192.0.2.1 is a test address; connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
    finally:
        probe.close()


class BrokerConfig(MetricsSettings, kw_only=True):
    """The broker's settings with RocketMQ's defaults. Times are in ms.

    UPDATE_BROKER_CONFIG changes the settings of a running broker. Annotations mark two exceptions:

    - START: the new value is stored, but takes effect only at the next start.
    - FIXED: the change is refused. Most of these settings define the broker's directories, identity,
      addresses or file lengths; with a wrong value the broker would not start, or would start as a different
      broker. Other FIXED settings decide whether uploaded code is run (Apache's broker built a command from
      such settings: CVE-2023-33246).
    """

    broker_name: Annotated[str, FIXED] = msgspec.field(default_factory=host_name)
    broker_cluster_name: Annotated[str, FIXED] = "DefaultCluster"
    broker_id: Annotated[int, Range(0, LONG_MAX, "0 for a master, a positive number for a slave"), FIXED] = 0
    broker_ip1: Annotated[str, FIXED] = msgspec.field(default_factory=local_address)
    broker_ip2: Annotated[str, FIXED] = ""
    listen_port: Annotated[int, _PORT, FIXED] = 10911
    bind_address: Annotated[str, FIXED] = ""  # CometMQ only: the interface to listen on ("": all interfaces)
    grpc_port: Annotated[int, _GRPC_PORT, FIXED] = -1  # CometMQ only: port for 5.x clients
    grpc_proxy_protocol_enable: Annotated[bool, FIXED] = False  # CometMQ only: PROXY headers on `grpcPort`
    grpc_cluster_route_enable: Annotated[bool, START] = False  # CometMQ only: other masters in gRPC routes
    grpc_trace_enable: Annotated[bool, START] = False  # CometMQ only: message traces for 5.x clients
    http_gateway_enable: Annotated[bool, FIXED] = True  # CometMQ only: HTTP beside gRPC on `grpcPort`
    vip_channel_enable: Annotated[bool, FIXED] = True  # CometMQ only: whether to open port `listenPort` - 2
    namesrv_addr: Annotated[str, FIXED] = msgspec.field(default_factory=lambda: environment_namesrv()[1])
    fetch_namesrv_addr_by_address_server: Annotated[bool, FIXED] = False
    rmq_address_server_domain: Annotated[str, FIXED] = DEFAULT_DOMAIN
    rmq_address_server_sub_group: Annotated[str, FIXED] = DEFAULT_SUB_GROUP
    broker_permission: Annotated[int, Range(0, 7, "2 write, 4 read, 6 both")] = 6
    default_topic_queue_nums: Annotated[int, _QUEUES, START] = 8
    max_topic_queue_nums: Annotated[int, _QUEUES] = 1024  # CometMQ only. BenchmarkTest has 1024 queues.
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    cluster_topic_enable: Annotated[bool, START] = True
    broker_topic_enable: Annotated[bool, START] = True
    trace_topic_enable: Annotated[bool, START] = False
    msg_trace_topic_name: Annotated[str, START] = TRACE_TOPIC
    flush_consumer_offset_interval: Annotated[int, _PERIOD, START] = 5_000
    long_polling_enable: bool = True
    short_polling_time_mills: Annotated[int, _MS] = 1_000
    max_held_pulls_per_connection: Annotated[int, _PARKED] = 16_384  # This setting exists only in CometMQ
    max_held_pulls_per_queue: Annotated[int, _PARKED] = 4_096  # This setting exists only in CometMQ
    notify_consumer_ids_changed_enable: bool = True
    enable_property_filter: bool = True  # Whether SQL92 filters are enabled; Apache's default is false
    slave_read_enable: bool = False
    start_accept_send_request_time_stamp: Annotated[int, Range(0, LONG_MAX, "milliseconds since 1970")] = 0
    broker_fast_failure_enable: bool = True
    wait_time_mills_in_send_queue: Annotated[int, _MS] = 200
    wait_time_mills_in_pull_queue: Annotated[int, _MS] = 5_000
    wait_time_mills_in_lite_pull_queue: Annotated[int, _MS] = 5_000
    wait_time_mills_in_heartbeat_queue: Annotated[int, _MS] = 31_000
    wait_time_mills_in_transaction_queue: Annotated[int, _MS] = 3_000
    os_page_cache_busy_time_out_mills: Annotated[int, _MS] = 1_000
    max_unflushed_bytes: Annotated[int, Range(0, LONG_MAX, "bytes (0: no limit)")] = 1 << 30  # CometMQ only
    # The limits of all topics, groups and accounts that have none of their own (CometMQ only)
    max_topic_send_messages_per_second: Annotated[int, _RATE] = 0
    max_topic_send_bytes_per_second: Annotated[int, _RATE] = 0
    max_group_receive_messages_per_second: Annotated[int, _RATE] = 0
    max_group_receive_bytes_per_second: Annotated[int, _RATE] = 0
    max_account_send_messages_per_second: Annotated[int, _RATE] = 0
    max_account_send_bytes_per_second: Annotated[int, _RATE] = 0
    max_account_receive_messages_per_second: Annotated[int, _RATE] = 0
    max_account_receive_bytes_per_second: Annotated[int, _RATE] = 0
    disable_consume_if_consumer_read_slowly: bool = False
    consumer_fallbehind_threshold: Annotated[int, _BYTES] = 16 << 30
    register_name_server_period: Annotated[int, _MS, START] = 30_000
    register_broker_timeout_mills: Annotated[int, Range(1, 600_000, "milliseconds")] = 6_000
    compressed_register: bool = False
    ha_listen_port: Annotated[int, _HA_PORT, FIXED] = 0  # If 0, slaves connect to port `listenPort` + 1
    ha_master_address: Annotated[str, FIXED] = ""
    ha_send_heartbeat_interval: Annotated[int, _PERIOD] = 5_000
    ha_housekeeping_interval: Annotated[int, _PERIOD] = 20_000
    ha_transfer_batch_size: Annotated[int, _HA_BATCH] = 32_768
    ha_slave_fallbehind_max: Annotated[int, _BYTES] = 256 << 20
    slave_timeout: Annotated[int, _MS] = 3_000
    d_leger_join: Annotated[bool, FIXED] = False  # Only in CometMQ: whether to join an existing raft group
    in_sync_replicas: Annotated[int, _REPLICAS] = 1
    min_in_sync_replicas: Annotated[int, _REPLICAS] = 1
    enable_auto_in_sync_replicas: bool = False
    flush_delay_offset_interval: Annotated[int, _PERIOD, START] = 10_000
    timer_wheel_enable: bool = True
    timer_max_delay_sec: Annotated[int, Range(1, 3650 * 86_400, "seconds")] = 40 * 86_400  # Apache's: 3 days
    # CometMQ only. Each timer message that waits for its delivery takes 30 bytes of memory.
    timer_max_waiting: Annotated[int, Range(0, INT_MAX, "messages")] = 4_000_000
    # CometMQ only. Each remembered key of a message takes 350 bytes of memory.
    dedup_max_keys: Annotated[int, _KEYS] = 1_000_000
    dedup_max_keys_per_topic: Annotated[int, _KEYS] = 500_000  # CometMQ only
    recall_message_enable: bool = True  # Whether messages can be recalled; Apache's default is false
    reject_transaction_message: bool = False
    store_reply_message_enable: bool = True
    # Apache's default is 20,000, and applies only if enableLmqQuota is set
    max_lmq_consume_queue_num: Annotated[int, Range(0, INT_MAX, "lite topics")] = 10_000_000
    transaction_time_out: Annotated[int, Range(0, INT_MAX, "milliseconds")] = 6_000
    transaction_check_max: Annotated[int, Range(1, INT_MAX)] = 15
    transaction_check_interval: Annotated[int, _PERIOD] = 60_000
    trace_on: bool = True
    region_id: str = "DefaultRegion"
    filter_server_nums: Annotated[int, Range(0, 64, "processes"), FIXED] = 0
    tls_server_mode: Annotated[str, FIXED] = ""  # Empty means `permissive` if `tls.config.file` is set
    tls_config_file: Annotated[str, FIXED] = ""
    use_tls: Annotated[bool, FIXED] = False
    acl_enable: Annotated[bool, FIXED] = False
    rocketmq_home: Annotated[str, FIXED] = ""  # The subdirectory `conf` of this directory holds the ACL files
    log_level: str = ""  # This setting exists only in CometMQ
    broker_config_path: Annotated[str, FIXED] = ""
    extra: dict[str, str] = msgspec.field(default_factory=dict)
    store: StoreConfig = msgspec.field(default_factory=StoreConfig)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> BrokerConfig:
        """Create the settings from a properties file's pairs. Raises ConfigError for an invalid value."""
        own, store, extra = _divided(properties)
        for key in extra:
            if key not in INERT.defaults:
                settings.warn_unknown(key, KNOWN_KEYS)
        INERT.check(properties)
        config = cls(**own, extra=extra, store=StoreConfig.from_properties(store))
        config.check()
        role = config.store.broker_role
        if config.broker_id and role != SLAVE and not config.store.enable_d_leger_commit_log:
            log.warning(
                "brokerId=%d is replaced by %d, because brokerRole=%s", config.broker_id, MASTER_ID, role
            )
            config.broker_id = MASTER_ID
        return config

    def check(self) -> None:
        """Raise ConfigError for values that have the right type but are out of range or inconsistent."""
        settings.check_ranges(RANGES, lambda key: int(getattr(self, FIELD_OF_KEY[key])))
        if self.store.enable_d_leger_commit_log:
            store = self.store
            check_member(store.d_leger_self_id, store.d_leger_peers, store.preferred_leader_id)
        if self.store.broker_role == SLAVE and self.broker_id == 0:
            raise ConfigError("brokerId", "0", "a positive number, for brokerRole=SLAVE")
        if self.default_topic_queue_nums > self.max_topic_queue_nums:
            expected = f"at most maxTopicQueueNums ({self.max_topic_queue_nums})"
            raise ConfigError("defaultTopicQueueNums", str(self.default_topic_queue_nums), expected)
        DelayLevels.of(self.store)
        for key, name in (("brokerName", self.broker_name), ("brokerClusterName", self.broker_cluster_name)):
            # The broker has one topic with its own name and one with the cluster's name, so both names must
            # be valid topic names.
            if not 0 < len(name.strip()) <= MAX_TOPIC_LENGTH or "/" in name or name in (".", ".."):
                expected = f"a name that is not blank, of at most {MAX_TOPIC_LENGTH} characters, without /"
                raise ConfigError(key, name, expected)
        if not is_legal_name(self.msg_trace_topic_name, MAX_TOPIC_LENGTH):
            raise ConfigError("msgTraceTopicName", self.msg_trace_topic_name, "the name of a topic")
        settings.check_host("brokerIP1", self.broker_ip1)
        for key, host in (("brokerIP2", self.broker_ip2), ("bindAddress", self.bind_address)):
            if host:
                settings.check_host(key, host)
        domain = self.rmq_address_server_domain
        if parse_address(domain if ":" in domain else f"{domain}:8080") is None:
            raise ConfigError("rmqAddressServerDomain", domain, "a host, or host:port")
        if not is_legal_name(self.rmq_address_server_sub_group, MAX_TOPIC_LENGTH):
            raise ConfigError("rmqAddressServerSubGroup", self.rmq_address_server_sub_group, "a name")
        if self.ha_master_address and parse_address(self.ha_master_address) is None:
            raise ConfigError("haMasterAddress", self.ha_master_address, "host:port of a master's HA port")
        if self.min_in_sync_replicas > max(2, self.in_sync_replicas):
            expected = "at most inSyncReplicas, or 2"
            raise ConfigError("minInSyncReplicas", str(self.min_in_sync_replicas), expected)
        self.check_metrics()
        settings.check_levels(self.log_level)
        if self.namesrv_addr:
            settings.check_addresses("namesrvAddr", self.namesrv_addr)

    def properties(self) -> dict[str, str]:
        """Return all settings as strings by RocketMQ's names, including store settings and unknown keys."""
        pairs = {key: settings.show_value(getattr(self, field)) for key, field in FIELD_OF_KEY.items()}
        pairs.update(self.store.to_properties())
        pairs.update({key: self.extra.get(key, default) for key, default in INERT.defaults.items()})
        pairs.update(self.extra)
        return pairs

    def update(
        self, properties: Mapping[str, str], check: Callable[[StoreConfig], None] | None = None
    ) -> list[str]:
        """Apply settings to a running broker, unless one is invalid (ConfigError). Return the known keys.

        `check` is called if messages would be on the disk for a shorter time, and may raise ConfigError.
        """
        own, store, extra = _divided(properties)
        new_store = (
            StoreConfig.from_properties({**self.store.to_properties(), **store}) if store else self.store
        )
        msgspec.structs.replace(self, **own, store=new_store).check()
        inert = {key: text for key, text in extra.items() if key in INERT.defaults}
        INERT.check({**inert, **store})
        if check is not None and new_store.local_reserved_time < self.store.local_reserved_time:
            check(new_store)
        for field, value in own.items():
            setattr(self, field, value)
        self.store = new_store
        self.extra = {**self.extra, **inert}
        return [key for key in properties if key in KNOWN_KEYS]

    @property
    def register_period_ms(self) -> int:
        """The setting `registerNameServerPeriod`, limited to 10 to 60 s as in Apache's broker."""
        return max(10_000, min(self.register_name_server_period, 60_000))

    @property
    def namesrv_addresses(self) -> list[str]:
        """The addresses in `namesrvAddr`, where they are separated by `;`."""
        return settings.check_addresses("namesrvAddr", self.namesrv_addr) if self.namesrv_addr else []


def _divided(properties: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Return the broker's settings (parsed, by field), the store's, and others. Raises ConfigError."""
    own = {
        field: settings.read_value(key, text, FIELD_TYPES[field])
        for key, text in properties.items()
        if (field := FIELD_OF_KEY.get(key))
    }
    store = {key: text for key, text in properties.items() if key in STORE_KEYS}
    extra = {k: text for k, text in properties.items() if k not in FIELD_OF_KEY and k not in STORE_KEYS}
    return own, store, extra


RANGES = settings.annotations_of(BrokerConfig, Range)
"""The permitted range of each numeric setting, by key."""
NOT_BY_REQUEST = settings.keys_with(FIXED, BrokerConfig, StoreConfig) | {
    "configBlackList", "messageStorePlugIn", "mappedFileSizeConsumeQueueExt",
}  # fmt: skip
"""Settings that UPDATE_BROKER_CONFIG must not change: those marked FIXED, and three without an effect."""
AT_NEXT_START = settings.keys_with(START, BrokerConfig, StoreConfig)
"""Settings that UPDATE_BROKER_CONFIG stores, but that take effect only at the next start."""

FIELD_TYPES = {
    name: kind
    for name, hint in settings.hints_of(BrokerConfig).items()
    if (kind := getattr(hint, "__origin__", hint)) in (bool, int, str)
}
FIELD_OF_KEY = {settings.camel(field): field for field in FIELD_TYPES}
STORE_KEYS = frozenset(StoreConfig().to_properties())
KNOWN_KEYS = frozenset({*FIELD_OF_KEY, *STORE_KEYS, *INERT.defaults})
