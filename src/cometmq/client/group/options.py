"""Settings of consumers. Times are seconds, sizes bytes unless named; defaults are RocketMQ's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from cometmq.client.cluster.decoding import MAX_BODY
from cometmq.client.cluster.hooks import ConsumeHook, FilterHook
from cometmq.client.group.allocate import AllocateAveragely, AllocateStrategy
from cometmq.client.group.process_queue import FlowLimits
from cometmq.errors import ConfigError

__all__ = ["ConsumeFromWhere", "MessageModel", "PullOptions", "PushOptions"]


_RETRIES = 16
_WITHOUT_END = 2**31 - 1
"""Tries of an orderly message (docs/reference/client.md, Orderly consumption)."""


class ConsumeFromWhere(Enum):
    """Where a group without stored offsets starts. Values are the wire names."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(Enum):
    """CLUSTERING: the members of a group share the queues. BROADCASTING: each member reads all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Settings of a pull consumer."""

    broker_suspend_s: float = 20.0
    """How long the broker may hold a blocking pull."""
    suspend_timeout_s: float = 30.0
    pull_timeout_s: float = 10.0
    pull_batch_size: int = 32
    max_body: int = MAX_BODY
    """Bodies that inflate to more are given out as stored, see PullResult.oversized."""
    persist_interval_s: float = 5.0
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: int | None = None
    """With TIMESTAMP: start at this store time; None: half an hour before the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """Settings of a push consumer."""

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
    orderly: bool = False
    """The listener gets the messages of a queue one batch after another, in their order, and no other member
    has the queue meanwhile. It is an OrderlyListener then."""
    suspend_current_queue_s: float = 1.0
    """Orderly: how long a queue rests after a failure, unless the context says otherwise."""
    max_reconsume_times: int | None = None
    """Failures after which a message becomes a dead letter; None: 16, or orderly 2**31 - 1."""
    consume_timeout_s: float = 900.0
    """A message whose listener runs longer is sent back, so that the queue's offset can move on. Not when
    orderly: nothing may overtake it."""
    consume_hooks: Sequence[ConsumeHook] = ()
    """Told of each call of the listener."""
    filter_hooks: Sequence[FilterHook] = ()
    """Choose among the pulled messages, behind the subscription; what one turns down counts as handled."""
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
        if self.orderly and self.message_model is MessageModel.BROADCASTING:
            expected = "CLUSTERING with orderly=True, because brokers lock a queue for one member"
            raise ConfigError("message_model", self.message_model.name, expected)
        _check_range("consume_concurrency", self.consume_concurrency, 1, 1000)
        _check_range("consume_batch_max_size", self.consume_batch_max_size, 1, 1024)
        _check_range("pull_batch_size", self.pull_batch_size, 1, 1024)
        if self.max_reconsume_times is not None:
            _check_range("max_reconsume_times", self.max_reconsume_times, 0, _WITHOUT_END)
        _check_range("flow_limits.max_count", self.flow_limits.max_count, 1, 65535)
        _check_range("flow_limits.max_mib", self.flow_limits.max_mib, 1, 1024)
        _check_range("flow_limits.max_span", self.flow_limits.max_span, 1, 65535)

    @property
    def most_reconsume_times(self) -> int:
        """max_reconsume_times, or its default."""
        if self.max_reconsume_times is not None:
            return self.max_reconsume_times
        return _WITHOUT_END if self.orderly else _RETRIES


def _check_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(key, str(value), f"{low} to {high}")
