"""The settings of consumers. Times are in seconds, sizes in bytes. The defaults are RocketMQ's.

The permitted ranges are those of Java's client (docs/reference/client.md), without values that would stop a
consumer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal, Protocol

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
"""A function called with a topic, all its queues and this member's share, when these have changed."""


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
    consume_timestamp_ms: Annotated[int | None, (0, 2**63 - 1)] = None
    start_strictly: bool = False
    allocate_strategy: AllocateStrategy = field(default_factory=AllocateAveragely)
    queue_listener: QueueListener | None = None
    pull_batch_size: Annotated[int, (1, 1024)] = 32
    suspend_timeout_s: Annotated[float, SOME_TIME] = 30.0
    rebalance_interval_s: Annotated[float, SOME_TIME] = 20.0
    persist_interval_s: Annotated[float, SOME_TIME] = 5.0
    stall_after_s: Annotated[float, SOME_TIME] = 180.0
    offset_storage: OffsetStorage | None = None
    offset_dir: str | None = None

    def __post_init__(self) -> None:
        check_choice("message_model", self.message_model, MessageModel)
        check_choice("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        check_ranges(self)
        if self.queue_listener is not None:
            check_hooks("queue_listener", [self.queue_listener])
        _check_object("allocate_strategy", self.allocate_strategy, "name", "allocate")
        if self.offset_storage is not None:
            _check_object("offset_storage", self.offset_storage, "read", "write")


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
    pull_timeout_s: Annotated[float, SOME_TIME] = 10.0
    max_body: Annotated[int, (1, math.inf)] = MAX_BODY
    auto_commit: bool = True
    max_reconsume_times: Annotated[int, (0, _WITHOUT_END)] = 16

    def __post_init__(self) -> None:
        MemberOptions.__post_init__(self)
        check_range("broker_suspend_s", self.broker_suspend_s, 0.0, self.suspend_timeout_s)


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
    invisible_s: Annotated[float, LEASE_RANGE_S] = 60.0
    consume_concurrency: Annotated[int, (1, MAX_CONCURRENCY)] = 20
    consume_batch_max_size: Annotated[int, (1, 1024)] = 1
    pull_interval_s: Annotated[float, (0.0, 65.535)] = 0.0
    handover_timeout_s: Annotated[float, _ANY_TIME] = 5.0
    broker_suspend_s: float = 15.0
    none_means: Literal["success", "retry", "error"] = "success"
    max_body: Annotated[int, (1, math.inf)] = MAX_BODY
    flow_limits: FlowLimits = field(default_factory=FlowLimits)
    topic_max_count: Annotated[int | None, (1, 6_553_500)] = None
    topic_max_mib: Annotated[int | None, (1, 102_400)] = None
    orderly: bool = False
    suspend_current_queue_s: Annotated[float, (0.01, 30)] = 1.0
    max_reconsume_times: Annotated[int | None, (0, _WITHOUT_END)] = None
    consume_timeout_s: Annotated[float, SOME_TIME] = 900.0
    consume_hooks: Sequence[ConsumeHook] = ()
    filter_hooks: Sequence[FilterHook] = ()
    drain_timeout_s: Annotated[float, _ANY_TIME] = 30.0
    pull_error_delay_s: Annotated[float, _ANY_TIME] = 1.0

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
        check_range("broker_suspend_s", self.broker_suspend_s, 0.0, self.suspend_timeout_s)
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
    invisible_s: Annotated[float, LEASE_RANGE_S] = 60.0
    wait_s: Annotated[float, WAIT_RANGE_S] = 15.0

    def __post_init__(self) -> None:
        check_choice("consume_from_where", self.consume_from_where, ConsumeFromWhere)
        if self.consume_from_where is ConsumeFromWhere.TIMESTAMP:
            expected = "FIRST_OFFSET or LAST_OFFSET, because brokers choose the start of a simple consumer"
            raise ConfigError("consume_from_where", self.consume_from_where.name, expected)
        check_ranges(self)
