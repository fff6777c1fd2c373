"""The settings of consumers. Times are in seconds, sizes in bytes. The defaults are RocketMQ's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from cometmq.client.cluster.decoding import MAX_BODY
from cometmq.client.cluster.hooks import ConsumeHook, FilterHook, check_hooks
from cometmq.client.cluster.options import SOME_TIME, check_choice, check_range, check_ranges
from cometmq.client.group.allocate import AllocateAveragely, AllocateStrategy
from cometmq.client.group.process_queue import FlowLimits
from cometmq.errors import ConfigError, shown
from cometmq.message import MessageQueue

MAX_CONCURRENCY = 1000
_RETRIES = 16
_WITHOUT_END = 2**31 - 1
"""The default maximum of retries of an orderly message (docs/reference/client.md, Orderly consumption)."""
_ANY_TIME = (0.0, math.inf)
LEASE_RANGE_S = (1.0, 43_200.0)
"""The permitted range of a new lease in seconds: up to 12 hours, as at Apache's proxy."""
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
    "consume_concurrency": (1, MAX_CONCURRENCY),
    "consume_batch_max_size": (1, 1024),
    "invisible_s": LEASE_RANGE_S,
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
"""The permitted ranges of numeric settings.

They are the ranges of Java's client (docs/reference/client.md), without the values that would stop a
consumer.
"""


class ConsumeFromWhere(Enum):
    """The position at which a group without stored offsets starts. The values are the wire names.

    Attributes:
        LAST_OFFSET: After the last message of each queue, but see MemberOptions.start_strictly.
        FIRST_OFFSET: At the first stored message of each queue.
        TIMESTAMP: At the store time MemberOptions.consume_timestamp_ms.
    """

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class MessageModel(Enum):
    """How the members of a group consume queues.

    Attributes:
        CLUSTERING: The members share the queues.
        BROADCASTING: Each member consumes all queues.
    """

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class OffsetStorage(Protocol):
    """A user-defined storage for the offsets of a group.

    If a method raises an exception, its operation is tried again.
    """

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the stored offset of a queue, None if none was stored."""

    async def write(self, table: Mapping[MessageQueue, int]) -> None:
        """Store the offsets in `table`. Must return only when the offsets are stored durably."""


QueueListener = Callable[[str, tuple[MessageQueue, ...], tuple[MessageQueue, ...]], object]
"""A function called when a topic's queues or this member's share of them have changed.

Arguments: the topic, all its queues, this member's share.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """The common settings of push and pull consumers. Times are in seconds.

    Attributes:
        message_model: Whether the members share the queues or each consumes all of them.
        consume_from_where: The position at which a group without stored offsets starts.
        consume_timestamp_ms: The start position for TIMESTAMP, in milliseconds since 1970. None: half an hour
            before the start.
        start_strictly: Start a new group exactly at `consume_from_where`. False: as in RocketMQ, a new group
            starts at the first message of a queue, even with LAST_OFFSET and TIMESTAMP, if the broker still
            has that message in memory.
        allocate_strategy: The distribution of queues among the members, the same for all members: an instance
            of one of the Allocate… classes or of a class with `name` and `allocate`.
        queue_listener: A function called when the queues of a subscribed topic, or this member's share of
            them, have changed. Its arguments: the topic, all its queues, and this member's share.
        pull_batch_size: The maximum number of messages per pull, 1 to 1024. Java's lite pull consumer uses
            10.
        suspend_timeout_s: The timeout after which the client gives up a pull request that the broker may hold
            until messages arrive.
        rebalance_interval_s: The interval between two rebalances.
        persist_interval_s: The interval at which offsets are stored.
        stall_after_s: If a queue with pulled messages makes no progress for this long, health() and the log
            report it.
        offset_storage: The storage of the offsets. None: the brokers, with BROADCASTING a local file.
        offset_dir: The directory of the local offset files for BROADCASTING. None: ~/.rocketmq_offsets.
    """

    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: int | None = None
    start_strictly: bool = False
    allocate_strategy: AllocateStrategy = field(default_factory=AllocateAveragely)
    queue_listener: QueueListener | None = None
    pull_batch_size: int = 32
    suspend_timeout_s: float = 30.0
    rebalance_interval_s: float = 20.0
    persist_interval_s: float = 5.0
    stall_after_s: float = 180.0
    offset_storage: OffsetStorage | None = None
    offset_dir: str | None = None

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
        """Raise ConfigError if a broker may hold a pull for longer than the client waits for the answer."""
        check_range("suspend_timeout_s", self.suspend_timeout_s, *SOME_TIME)
        check_range("broker_suspend_s", broker_suspend_s, 0.0, self.suspend_timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(MemberOptions):
    """The settings of a pull consumer. Times are in seconds, sizes in bytes.

    Attributes:
        broker_suspend_s: The maximum time for which a broker suspends a blocking pull.
        pull_timeout_s: The timeout of a pull that does not wait for messages.
        max_body: Bodies that are larger than this after decompression are returned compressed, see
            PullResult.oversized.
        auto_commit: Whether a poll commits the messages of earlier polls. False: only commit() stores
            offsets.
        max_reconsume_times: The number of retries after which a message that is sent back goes to the
            dead-letter queue.
    """

    broker_suspend_s: float = 20.0
    pull_timeout_s: float = 10.0
    max_body: int = MAX_BODY
    auto_commit: bool = True
    max_reconsume_times: int = 16

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        self._check_suspension(self.broker_suspend_s)
        check_ranges(self, _PULL_RANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions(MemberOptions):
    """The settings of a push consumer. Times are in seconds, sizes in bytes.

    Attributes:
        share: What the members of the group share. queues: each queue belongs to one member, which pulls it.
            messages: each message is leased to one member (POP), so that there may be more members than
            queues; brokers of RocketMQ 5 and CometMQ support it. broker: for each topic, what the operator
            has set with `mqadmin setConsumeMode`.
        invisible_s: The length of a lease, 1 s to 12 hours. Leases are renewed until the listener returns;
            after a crash the messages are delivered again when their leases end.
        consume_concurrency: The maximum number of concurrent listener calls, 1 to 1000, and the number of
            threads for a plain listener. set_concurrency() changes it at run time.
        consume_batch_max_size: The maximum number of messages per listener call, 1 to 1024.
        pull_interval_s: The delay between two pulls of a queue.
        handover_timeout_s: The maximum time for which this member, before it releases a queue to another
            member, waits for its running listener calls. Their messages are then not consumed twice. A
            member that receives a queue waits for this time plus one second at most until the previous member
            has released the queue, even if that member was killed. 0: no member waits.
        broker_suspend_s: The maximum time for which a broker suspends a pull without messages.
        none_means: The meaning of a listener's result None. success: the messages are consumed. retry: they
            are consumed again, as in Java. error: the call failed with a TypeError, which is logged, and they
            are consumed again.
        max_body: A message whose body is larger than this after decompression is sent back without a call of
            the listener.
        flow_limits: The maximum numbers of pulled messages and bytes per queue.
        topic_max_count: The maximum number of pulled messages of all queues together, divided among the
            assigned queues; also the maximum number of leased messages. None: no maximum for pulled messages,
            and leases for two messages per possible listener call.
        topic_max_mib: The maximum size of pulled messages of all queues together in MiB, divided likewise.
        orderly: Call the listener with one batch of a queue after another, in the order of the queue, which
            is locked for this member. The listener must be an OrderlyListener.
        suspend_current_queue_s: Orderly: the pause of a queue after a failed listener call. The call can set
            another pause in its OrderlyContext.
        max_reconsume_times: The number of retries after which a message goes to the dead-letter queue. None:
            16, with orderly 2**31 - 1. The value of the member that fails to consume the message applies.
        consume_timeout_s: A message whose listener call takes longer is sent back, so that the offset of the
            queue can advance. Orderly: the call of an async listener is cancelled and fails; the call of a
            plain listener is only logged, because a thread cannot be cancelled.
        consume_hooks: Hooks called before and after each listener call.
        filter_hooks: Functions that select among the pulled messages that match the subscription. Rejected
            messages count as consumed.
        drain_timeout_s: The maximum wait of a stop for running listener calls.
        pull_error_delay_s: The delay before the next pull after a failed one.
    """

    share: Literal["queues", "messages", "broker"] = "queues"
    invisible_s: float = 60.0
    consume_concurrency: int = 20
    consume_batch_max_size: int = 1
    pull_interval_s: float = 0.0
    handover_timeout_s: float = 5.0
    broker_suspend_s: float = 15.0
    none_means: Literal["success", "retry", "error"] = "success"
    max_body: int = MAX_BODY
    flow_limits: FlowLimits = field(default_factory=FlowLimits)
    topic_max_count: int | None = None
    topic_max_mib: int | None = None
    orderly: bool = False
    suspend_current_queue_s: float = 1.0
    max_reconsume_times: int | None = None
    consume_timeout_s: float = 900.0
    consume_hooks: Sequence[ConsumeHook] = ()
    filter_hooks: Sequence[FilterHook] = ()
    drain_timeout_s: float = 30.0
    pull_error_delay_s: float = 1.0

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        if self.orderly and self.message_model is MessageModel.BROADCASTING:
            expected = "CLUSTERING with orderly=True, because brokers lock a queue for one member"
            raise ConfigError("message_model", self.message_model.name, expected)
        if self.none_means not in ("success", "retry", "error"):
            raise ConfigError("none_means", shown(self.none_means), '"success", "retry" or "error"')
        if self.share != "queues":
            self._check_share()
        check_hooks("consume_hooks", self.consume_hooks, "before_consume", "after_consume")
        check_hooks("filter_hooks", self.filter_hooks)
        self._check_suspension(self.broker_suspend_s)
        check_ranges(self, _PUSH_RANGES)
        for name, high in (("max_count", 65535), ("max_mib", 1024), ("max_span", 65535)):
            check_range(f"flow_limits.{name}", getattr(self.flow_limits, name), 1, high)

    def _check_share(self) -> None:
        """Raise ConfigError for a value of `share` that is unknown or does not suit another setting."""
        if self.share not in ("messages", "broker"):
            raise ConfigError("share", shown(self.share), '"queues", "messages" or "broker"')
        where = self.consume_from_where
        if self.message_model is MessageModel.BROADCASTING:
            raise ConfigError("message_model", self.message_model.name, "CLUSTERING, where members share")
        if where is ConsumeFromWhere.TIMESTAMP or self.offset_storage is not None:
            expected = '"queues" with TIMESTAMP or an offset_storage, because brokers store the progress'
            raise ConfigError("share", self.share, f"{expected} of a group that shares messages")
        if self.orderly and self.share == "broker":
            raise ConfigError("share", self.share, '"queues" or "messages" with orderly=True')
        if self.orderly and self.consume_batch_max_size != 1:
            size = str(self.consume_batch_max_size)
            raise ConfigError("consume_batch_max_size", size, '1 with orderly=True and share="messages"')

    @property
    def most_reconsume_times(self) -> int:
        """The value of `max_reconsume_times`, or its default for the consume mode if the value is None."""
        if self.max_reconsume_times is not None:
            return self.max_reconsume_times
        return _WITHOUT_END if self.orderly else _RETRIES


def _check_object(key: str, given: object, *names: str) -> None:
    """Raise ConfigError if a setting is a class, or an object that lacks one of the attributes in `names`."""
    if isinstance(given, type) or not all(hasattr(given, name) for name in names):
        raise ConfigError(key, repr(given), f"an object with {' and '.join(names)}")


MAX_MESSAGES = 32
"""The maximum number of messages per request to a broker, which brokers enforce."""
CHANGE_RANGE_S = (0.0, 43_200.0)
"""The permitted range of a changed lease in seconds."""
WAIT_RANGE_S = (0.0, 300.0)
"""The permitted range of the wait for messages in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleOptions:
    """The settings of a simple consumer. Times are in seconds.

    Attributes:
        consume_from_where: The position at which a new group starts: FIRST_OFFSET or LAST_OFFSET. As in
            RocketMQ, a new group starts at the first message of a queue, even with LAST_OFFSET, if the broker
            still has that message in memory.
        orderly: Receive the messages of a queue in order: while a message of a queue is leased, no other
            receive() returns messages of this queue. All members of the group must use the same value.
        invisible_s: The default length of a lease, 1 s to 12 hours.
        wait_s: The default time for which receive() waits for messages, up to 300 s.
    """

    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    orderly: bool = False
    invisible_s: float = 60.0
    wait_s: float = 15.0

    def __post_init__(self) -> None:
        check_choice("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        if self.consume_from_where is ConsumeFromWhere.TIMESTAMP:
            expected = "FIRST_OFFSET or LAST_OFFSET, because brokers choose the start of a simple consumer"
            raise ConfigError("consume_from_where", self.consume_from_where.name, expected)
        check_ranges(self, {"invisible_s": LEASE_RANGE_S, "wait_s": WAIT_RANGE_S})
