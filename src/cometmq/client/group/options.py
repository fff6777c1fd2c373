"""Settings of consumers. Times are seconds, sizes bytes unless named; defaults are RocketMQ's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from cometmq.client.cluster.decoding import MAX_BODY
from cometmq.client.cluster.hooks import ConsumeHook, FilterHook, check_hooks
from cometmq.client.cluster.ranges import SOME_TIME, check_choice, check_range, check_ranges
from cometmq.client.group.allocate import AllocateAveragely, AllocateStrategy
from cometmq.client.group.process_queue import FlowLimits
from cometmq.errors import ConfigError, shown
from cometmq.message import MessageQueue

__all__ = [
    "MOST_CONCURRENCY",
    "ConsumeFromWhere",
    "MemberOptions",
    "MessageModel",
    "OffsetStorage",
    "PullOptions",
    "PushOptions",
    "QueueListener",
]


MOST_CONCURRENCY = 1000
_RETRIES = 16
_WITHOUT_END = 2**31 - 1
"""Tries of an orderly message (docs/reference/client.md, Orderly consumption)."""
_ANY_TIME = (0.0, math.inf)
_MEMBER_RANGES = {
    "consume_timestamp_ms": (0, 2**63 - 1),
    "pull_batch_size": (1, 1024),
    "rebalance_interval_s": SOME_TIME,
    "persist_interval_s": SOME_TIME,
    "stall_after_s": SOME_TIME,
}
_PULL_RANGES = {
    "pull_timeout_s": SOME_TIME,
    "max_body": (1, math.inf),
    "max_reconsume_times": (0, _WITHOUT_END),
}
_PUSH_RANGES = {
    "consume_concurrency": (1, MOST_CONCURRENCY),
    "consume_batch_max_size": (1, 1024),
    "pull_interval_s": (0.0, 65.535),
    "handover_timeout_s": _ANY_TIME,
    "max_body": (1, math.inf),
    "topic_max_count": (1, 6_553_500),
    "topic_max_mib": (1, 102_400),
    "suspend_current_queue_s": (0.01, 30),
    "max_reconsume_times": (0, _WITHOUT_END),
    "consume_timeout_s": SOME_TIME,
    "drain_timeout_s": _ANY_TIME,
    "pull_error_delay_s": _ANY_TIME,
}
"""As Java's client checks them (docs/reference/client.md), and what would end or stop a consumer."""


class ConsumeFromWhere(Enum):
    """Where a group without stored offsets starts. Values are the wire names."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(Enum):
    """CLUSTERING: the members of a group share the queues. BROADCASTING: each member reads all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class OffsetStorage(Protocol):
    """A place of your own for a group's offsets. Whatever its methods raise is taken for "not now"."""

    async def read(self, queue: MessageQueue) -> int | None:
        """The offset of a queue, None if none was ever written."""

    async def write(self, table: Mapping[MessageQueue, int]) -> None:
        """Keep these; returns when they are safe."""


QueueListener = Callable[[str, tuple[MessageQueue, ...], tuple[MessageQueue, ...]], object]
"""Called with a topic, all its queues, and those of this member, when either has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """What push and pull consumers have in common."""

    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: int | None = None
    """With TIMESTAMP: start at this store time; None: half an hour before the start."""
    start_strictly: bool = False
    """Let a new group start where `consume_from_where` says. False is RocketMQ's rule: with LAST_OFFSET and
    TIMESTAMP, too, it starts at the first message of a queue whose broker still has that in memory."""
    allocate_strategy: AllocateStrategy = field(default_factory=AllocateAveragely)
    """How the members share the queues: one of Allocate..., or your own; the same for all members."""
    queue_listener: QueueListener | None = None
    """Told of the queues of the subscribed topics, and which of them are this member's."""
    pull_batch_size: int = 32
    """Java's lite pull consumer asks for 10."""
    suspend_timeout_s: float = 30.0
    rebalance_interval_s: float = 20.0
    persist_interval_s: float = 5.0
    stall_after_s: float = 180.0
    """A queue of which messages are held, and none was done for so long, is named by health() and in the
    log."""
    offset_storage: OffsetStorage | None = None
    """Where offsets are kept; None: at the brokers, or with BROADCASTING in a local file."""
    offset_dir: str | None = None
    """BROADCASTING: where local offsets lie; None: ~/.rocketmq_offsets."""

    def __post_init__(self) -> None:
        check_choice("message_model", self.message_model, MessageModel)
        check_choice("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        check_ranges(self, _MEMBER_RANGES)
        if self.queue_listener is not None:
            check_hooks("queue_listener", [self.queue_listener])
        _check_object("allocate_strategy", self.allocate_strategy, "name", "allocate")
        if self.offset_storage is not None:
            _check_object("offset_storage", self.offset_storage, "read", "write")

    def _check_suspension(self, broker_suspend_s: float) -> None:
        """A broker that holds a pull for longer than we wait for it would never be heard."""
        check_range("suspend_timeout_s", self.suspend_timeout_s, *SOME_TIME)
        check_range("broker_suspend_s", broker_suspend_s, 0.0, self.suspend_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(MemberOptions):
    """Settings of a pull consumer."""

    broker_suspend_s: float = 20.0
    """How long the broker may hold a blocking pull."""
    pull_timeout_s: float = 10.0
    max_body: int = MAX_BODY
    """Bodies that inflate to more are given out as stored, see PullResult.oversized."""
    auto_commit: bool = True
    """Whether a poll commits what the polls before gave out. False: only commit() does."""
    max_reconsume_times: int = 16
    """Retries after which a message that is sent back becomes a dead letter."""

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        self._check_suspension(self.broker_suspend_s)
        check_ranges(self, _PULL_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions(MemberOptions):
    """Settings of a push consumer."""

    consume_concurrency: int = 20
    """Listener calls at once; also the number of threads when the listener is a plain function. A running
    consumer changes it with set_concurrency."""
    consume_batch_max_size: int = 1
    """Messages per listener call."""
    pull_interval_s: float = 0.0
    handover_timeout_s: float = 5.0
    """How long a queue that goes to another member waits for listener calls of it to end, so that nothing is
    handled twice; the next member waits a second longer, also for one that was killed. 0: nobody waits."""
    broker_suspend_s: float = 15.0
    none_means: Literal["success", "retry", "error"] = "success"
    """What a listener's None means: the messages are handled; they are consumed again, as in Java; or the
    listener failed, with a TypeError in the log, and they are consumed again."""
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
    """Failures after which a message becomes a dead letter; None: 16, or orderly 2**31 - 1. Where members
    of a group differ, the value of the member that fails on the message decides."""
    consume_timeout_s: float = 900.0
    """A message whose listener runs longer is sent back, so that the queue's offset can move on. When
    orderly, nothing may overtake it: the call of an async listener is cancelled and fails; that of a plain
    one is reported in the log, since a thread cannot be ended."""
    consume_hooks: Sequence[ConsumeHook] = ()
    """Told of each call of the listener."""
    filter_hooks: Sequence[FilterHook] = ()
    """Choose among the pulled messages, behind the subscription; what one turns down counts as handled."""
    drain_timeout_s: float = 30.0
    """How long a stop waits for listeners that are running."""
    pull_error_delay_s: float = 1.0

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        if self.orderly and self.message_model is MessageModel.BROADCASTING:
            expected = "CLUSTERING with orderly=True, because brokers lock a queue for one member"
            raise ConfigError("message_model", self.message_model.name, expected)
        if self.none_means not in ("success", "retry", "error"):
            raise ConfigError("none_means", shown(self.none_means), '"success", "retry" or "error"')
        check_hooks("consume_hooks", self.consume_hooks, "before_consume", "after_consume")
        check_hooks("filter_hooks", self.filter_hooks)
        self._check_suspension(self.broker_suspend_s)
        check_ranges(self, _PUSH_RANGES)
        for name, high in (("max_count", 65535), ("max_mib", 1024), ("max_span", 65535)):
            check_range(f"flow_limits.{name}", getattr(self.flow_limits, name), 1, high)

    @property
    def most_reconsume_times(self) -> int:
        """max_reconsume_times, or its default."""
        if self.max_reconsume_times is not None:
            return self.max_reconsume_times
        return _WITHOUT_END if self.orderly else _RETRIES


def _check_object(key: str, given: object, *names: str) -> None:
    """Raises ConfigError for an object without these attributes, and for a class in the place of one."""
    if isinstance(given, type) or not all(hasattr(given, name) for name in names):
        raise ConfigError(key, repr(given), f"an object with {' and '.join(names)}")
