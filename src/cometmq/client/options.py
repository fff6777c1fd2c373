"""What can be set on clients. Times are seconds, sizes bytes unless the name says otherwise; defaults are
RocketMQ's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cometmq.client.cluster.decoding import MAX_BODY
from cometmq.client.consumer.allocate import AllocateAveragely, AllocateStrategy
from cometmq.client.consumer.process_queue import FlowLimits
from cometmq.client.producer.retry import RETRY_RESPONSE_CODES
from cometmq.errors import ConfigError
from cometmq.protocol.addresses import parse_address

__all__ = [
    "ClientOptions",
    "ConsumeFromWhere",
    "MessageModel",
    "ProducerOptions",
    "PullOptions",
    "PushOptions",
    "namesrv_addresses",
]


class ConsumeFromWhere(Enum):
    """Where a group without stored offsets starts. Values are the wire names."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(Enum):
    """CLUSTERING: the members of a group share the queues. BROADCASTING: each member reads all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


def namesrv_addresses(namesrv: str | Sequence[str] | None) -> tuple[str, ...]:
    """`host:port` of every name server: the argument, else NAMESRV_ADDR, else the local default port.

    Text may hold several addresses divided by `;` or `,`.
    """
    given = namesrv if namesrv is not None else os.environ.get("NAMESRV_ADDR") or "127.0.0.1:9876"
    parts = given.replace(",", ";").split(";") if isinstance(given, str) else list(given)
    addresses = tuple(dict.fromkeys(part.strip().rpartition("/")[2] for part in parts if part.strip()))
    for address in addresses:
        if parse_address(address) is None:
            raise ConfigError("namesrv", address, "host:port, several divided by ';'")
    if not addresses:
        raise ConfigError("namesrv", str(namesrv), "host:port, several divided by ';'")
    return addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Of a ClientInstance: connections, routes and heartbeats that producers and consumers may share."""

    client_ip: str | None = None
    """Part of the client id and of message ids; None: the address this machine uses towards the name
    server."""
    instance_name: str | None = None
    """None: unique per instance (process id and a clock); DEFAULT for broadcasting consumers, whose offsets
    lie in a local file under this name: give each of several on one machine a name of its own."""
    unit_name: str | None = None
    route_interval_s: float = 30.0
    heartbeat_interval_s: float = 30.0
    api_timeout_s: float = 3.0
    """Limit of every request that has no limit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    send_timeout_s: float = 3.0
    """One budget for all tries of a send together. Waiting for others to end (max_in_flight) is not
    counted."""
    try_timeout_s: float | None = None
    """Limit of one try while more tries remain; None: a hanging broker may use the whole budget."""
    retry_times: int = 2
    """More tries after the first, each on another broker if there is one."""
    retry_response_codes: frozenset[int] = RETRY_RESPONSE_CODES
    retry_another_broker_when_not_store_ok: bool = False
    """Try again when the broker stored the message but a flush or a replica was late (this makes
    duplicates)."""
    compress_over: int = 4096
    """Bodies of this size and above are compressed (zlib level `compress_level`), batches never."""
    compress_level: int = 5
    max_message_size: int = 4 * 1024 * 1024
    max_delay_level: int = 18
    """The highest level of the brokers' messageDelayLevel; they take a higher one for it in silence."""
    create_topic_key: str = "TBW102"
    default_topic_queue_nums: int = 4
    max_in_flight: int = 4096
    """Sends under way at once; more wait (bounded memory when a caller starts a million sends)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    broker_suspend_s: float = 20.0
    """How long the broker may hold a blocking pull."""
    suspend_timeout_s: float = 30.0
    pull_timeout_s: float = 10.0
    pull_batch_size: int = 32
    max_body: int = MAX_BODY
    """A compressed body that is larger than this when decompressed is given out as stored, see
    PullResult.oversized."""
    persist_interval_s: float = 5.0
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: int | None = None
    """With TIMESTAMP: start at this store time; None: half an hour before the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: int | None = None
    """With TIMESTAMP: start at this store time; None: half an hour before the start."""
    allocate_strategy: AllocateStrategy = field(default_factory=AllocateAveragely)
    consume_concurrency: int = 20
    """Listener calls at once; also the number of threads when the listener is a plain function."""
    consume_batch_max_size: int = 1
    """Messages per listener call."""
    pull_batch_size: int = 32
    pull_interval_s: float = 0.0
    max_body: int = MAX_BODY
    """A message whose compressed body is larger than this when decompressed never reaches the listener: it
    is sent back as if the listener had failed."""
    flow_limits: FlowLimits = field(default_factory=FlowLimits)
    """Per queue."""
    topic_max_count: int | None = None
    """Messages held over all queues together; shared out among the held queues."""
    topic_max_mib: int | None = None
    max_reconsume_times: int = 16
    consume_timeout_s: float = 900.0
    """A message whose listener runs longer is sent back, so that the queue's offset can move on."""
    broker_suspend_s: float = 15.0
    suspend_timeout_s: float = 30.0
    rebalance_interval_s: float = 20.0
    persist_interval_s: float = 5.0
    drain_timeout_s: float = 30.0
    """How long a stop waits for listeners that are running."""
    pull_error_delay_s: float = 1.0
    offset_dir: str | None = None
    """BROADCASTING: where local offsets lie; None: ~/.rocketmq_offsets."""

    def __post_init__(self) -> None:
        _check_range("consume_concurrency", self.consume_concurrency, 1, 1000)
        _check_range("consume_batch_max_size", self.consume_batch_max_size, 1, 1024)
        _check_range("pull_batch_size", self.pull_batch_size, 1, 1024)
        _check_range("flow_limits.max_count", self.flow_limits.max_count, 1, 65535)
        _check_range("flow_limits.max_mib", self.flow_limits.max_mib, 1, 1024)
        _check_range("flow_limits.max_span", self.flow_limits.max_span, 1, 65535)


def _check_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(key, str(value), f"{low} to {high}")
