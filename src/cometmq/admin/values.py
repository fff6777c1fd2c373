"""What the administration operations answer with.

As JSON (`--json`) the fields carry RocketMQ's camel-case names. Times are milliseconds since the epoch, 0
where there is none; offsets count messages of a queue.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import isfinite

import msgspec

from cometmq.message import MessageExt, MessageQueue, SendResult, WaitingMessage
from cometmq.protocol.bodies import RETRY_MAX_TIMES, ClusterInfo, SubscriptionGroupConfig
from cometmq.protocol.codes import MASTER_ID
from cometmq.protocol.traces import AnyTrace

LOG_END = "commitLogMaxOffset"


class Value(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the answers: immutable, JSON in camel case."""


class QueueStatus(Value, frozen=True, kw_only=True):
    """One queue of a topic on one broker."""

    broker_name: str
    queue_id: int
    min_offset: int
    max_offset: int
    last_update_timestamp: int


class TopicUse(Value, frozen=True, kw_only=True):
    """A topic, the cluster it lies in and the groups that have offsets on it."""

    cluster_name: str
    topic: str
    consumer_groups: list[str]


class BrokerStatus(Value, frozen=True, kw_only=True):
    """One broker process and what it says about itself: the table of GET_BROKER_RUNTIME_INFO.

    role: SYNC_MASTER, ASYNC_MASTER or SLAVE; of a member of a raft group its part in that, as leader; of an
    Apache broker, which does not say it, MASTER or SLAVE. lag: bytes of log that its master, or leader, has
    more; None for a master, and where either has not answered.
    """

    cluster_name: str
    broker_name: str
    broker_id: int
    broker_addr: str
    runtime: dict[str, str]
    role: str = ""
    lag: int | None = None
    problem: str = ""

    def first_number(self, key: str) -> float | None:
        """Return the first of the numbers under a key (rates are over 10, 60 and 600 s), None without one
        that is finite."""
        try:
            number = float(self.runtime.get(key, "").split()[0])
        except (IndexError, ValueError):
            return None
        return number if isfinite(number) else None

    def count(self, key: str) -> int:
        """A counter of the table, 0 where the broker has none."""
        try:
            number = int(self.runtime.get(key, ""))
        except ValueError:
            return 0
        return number if -(2**63) <= number < 2**63 else 0

    def saying(self, runtime: dict[str, str]) -> BrokerStatus:
        """The same with what the broker says."""
        return msgspec.structs.replace(self, runtime=runtime, role=role_of(runtime, self.broker_id))


def broker_places(info: ClusterInfo, cluster: str | None = None) -> list[BrokerStatus]:
    """Every broker of one or all clusters, none of which has been asked yet."""
    return [
        BrokerStatus(
            cluster_name=cluster_name, broker_name=name, broker_id=broker_id, broker_addr=addr, runtime={}
        )
        for cluster_name, names in sorted(info.cluster_addr_table.items())
        if cluster in (None, cluster_name)
        for name in sorted(names)
        if (data := info.broker_addr_table.get(name)) is not None
        for broker_id, addr in sorted(data.broker_addrs.items())
    ]


def role_of(runtime: Mapping[str, str], broker_id: int) -> str:
    """The role that a broker's table tells, or its id; "" for one that has not answered."""
    if not runtime:
        return ""
    by_id = "MASTER" if broker_id == MASTER_ID else "SLAVE"
    return runtime.get("raftRole") or runtime.get("brokerRole") or by_id


def with_lags(brokers: list[BrokerStatus]) -> list[BrokerStatus]:
    """The same brokers, with how far each is behind its master."""
    ends = {
        (each.cluster_name, each.broker_name): each.count(LOG_END)
        for each in brokers
        if each.broker_id == MASTER_ID and each.runtime
    }

    def known(each: BrokerStatus) -> BrokerStatus:
        end = ends.get((each.cluster_name, each.broker_name))
        if each.broker_id == MASTER_ID or end is None or not each.runtime:
            return each
        return msgspec.structs.replace(each, lag=max(0, end - each.count(LOG_END)))

    return [known(each) for each in brokers]


class QueueProgress(Value, frozen=True, kw_only=True):
    """How far a group is in one queue."""

    topic: str
    broker_name: str
    queue_id: int
    broker_offset: int
    consumer_offset: int
    last_timestamp: int
    client_ip: str = ""

    @property
    def diff(self) -> int:
        """Messages the group has not yet committed."""
        return self.broker_offset - self.consumer_offset


class GroupProgress(Value, frozen=True, kw_only=True):
    """How far a group is in all its queues."""

    group: str
    consume_tps: float
    queues: list[QueueProgress]

    @property
    def diff_total(self) -> int:
        return sum(queue.diff for queue in self.queues)


class GroupSummary(Value, frozen=True, kw_only=True):
    """One line about a group.

    Version, type and model are empty for a group without members. Rate and lag are None where they cannot be
    found out.
    """

    group: str
    count: int
    version: str
    consume_type: str
    message_model: str
    consume_tps: int | None
    diff_total: int | None


def known_sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are known, None if none is."""
    found = [value for value in values if value is not None]
    return sum(found) if found else None


class RetryLimits(Value, frozen=True, kw_only=True):
    """How often a group's messages are tried again: the group's own retryMaxTimes, and client id -> what this
    member named when it last handed a message back, which counts before it."""

    group: int = RETRY_MAX_TIMES
    members: dict[str, int] = {}

    @property
    def differ(self) -> bool:
        """Whether members name different numbers, or others than the group was given."""
        own = {self.group} - {RETRY_MAX_TIMES} if self.members else set()
        return len(own.union(self.members.values())) > 1


class MemberSubscriptions(Value, frozen=True, kw_only=True):
    """What a member of a group subscribes: topic -> expression; `problem` says why that is not known.
    settings: messageModel, consumeFromWhere and maxReconsumeTimes, as far as they are known. queues: those
    that it holds, where it was asked."""

    client_id: str
    client_addr: str
    version: str
    subscriptions: dict[str, str]
    problem: str = ""
    settings: dict[str, str] = {}
    queues: list[MessageQueue] | None = None


class GroupSubscriptions(Value, frozen=True, kw_only=True):
    """What the members of a group subscribe. differences: topic -> expression ("" for not subscribed) -> the
    client ids that say so, for the topics in which members differ. setting_differences: the same for their
    settings; the client id "" stands for the group itself, with the retryMaxTimes that it was given.
    unbalanced: the queues, as topic@broker:id, that have no member or several -> these; None: not known."""

    group: str
    members: list[MemberSubscriptions]
    differences: dict[str, dict[str, list[str]]]
    setting_differences: dict[str, dict[str, list[str]]] = {}
    unbalanced: dict[str, list[str]] | None = None


class TrackType(StrEnum):
    """What became of a message in a group."""

    CONSUMED = "CONSUMED"
    CONSUMED_BUT_FILTERED = "CONSUMED_BUT_FILTERED"
    PULL = "PULL"
    NOT_CONSUME_YET = "NOT_CONSUME_YET"
    NOT_ONLINE = "NOT_ONLINE"
    UNKNOWN = "UNKNOWN"


class MessageTrack(Value, frozen=True, kw_only=True):
    """What became of a message in one group; `exception_desc` says why that is not known."""

    consumer_group: str
    track_type: TrackType
    exception_desc: str = ""


class MessageView(Value, frozen=True, kw_only=True):
    """A stored message for people and scripts; a body that is no UTF-8 text is shown as Base64."""

    topic: str
    msg_id: str
    offset_msg_id: str
    tags: str | None
    keys: list[str]
    broker_name: str
    queue_id: int
    queue_offset: int
    commit_log_offset: int
    reconsume_times: int
    born_timestamp: int
    born_host: str
    store_timestamp: int
    store_host: str
    sys_flag: int
    store_size: int
    properties: dict[str, str]
    body: str
    body_encoding: str

    @classmethod
    def of(cls, message: MessageExt) -> MessageView:
        """View a message as it came from a broker, its body decompressed."""
        body = bytes(message.body)
        try:
            text, encoding = body.decode("utf-8"), "utf-8"
        except UnicodeDecodeError:
            text, encoding = b64encode(body).decode("ascii"), "base64"
        return cls(
            topic=message.topic,
            msg_id=message.msg_id,
            offset_msg_id=message.offset_msg_id,
            tags=message.tags,
            keys=list(message.keys),
            broker_name=message.broker_name,
            queue_id=message.queue_id,
            queue_offset=message.queue_offset,
            commit_log_offset=message.physical_offset,
            reconsume_times=message.reconsume_times,
            born_timestamp=message.born_timestamp_ms,
            born_host=message.born_host,
            store_timestamp=message.store_timestamp_ms,
            store_host=message.store_host,
            sys_flag=message.sys_flag,
            store_size=message.store_size,
            properties=dict(message.properties),
            body=text,
            body_encoding=encoding,
        )


class DeadLetterView(MessageView, frozen=True, kw_only=True):
    """A dead letter. original_topic: where it was sent first; origin_msg_id: the offset id that it had there;
    resend_times: how often it was sent again before it died; reconsume_times: how often it was tried."""

    original_topic: str | None
    origin_msg_id: str
    resend_times: int

    @classmethod
    def of_dead_letter(
        cls, message: MessageExt, original_topic: str | None, origin_msg_id: str, resend_times: int
    ) -> DeadLetterView:
        """View a message of a dead-letter topic."""
        return cls(
            **msgspec.structs.asdict(MessageView.of(message)),
            original_topic=original_topic,
            origin_msg_id=origin_msg_id,
            resend_times=resend_times,
        )


class DeadLetterCount(Value, frozen=True, kw_only=True):
    """The dead letters of a group; `problem` where a broker does not say how many it has."""

    group: str
    count: int
    last_update_timestamp: int
    problem: str = ""


class Resend(StrEnum):
    """What became of a dead letter that was to be sent again. SKIPPED: an earlier run did it. PLANNED: a dry
    run found it."""

    RESENT = "RESENT"
    SKIPPED = "SKIPPED"
    PLANNED = "PLANNED"
    FAILED = "FAILED"


class ResendResult(Value, frozen=True, kw_only=True):
    """A dead letter, by its ids, and its copy in the topic `target`."""

    state: Resend
    msg_id: str
    offset_msg_id: str
    original_topic: str | None
    keys: list[str]
    target: str
    copy_offset_msg_id: str = ""
    problem: str = ""


class TraceView(Value, frozen=True, kw_only=True):
    """A record about a message; the address of the client that wrote it, and when that was stored."""

    trace: AnyTrace
    client_host: str
    store_timestamp: int


class WaitingView(Value, frozen=True, kw_only=True):
    """A message that waits; deliver_at in ms, delay_level 0 for one with a time of its own."""

    deliver_at: int
    destination: str
    recall_handle: str | None
    delay_level: int
    message: MessageView

    @classmethod
    def of(cls, waiting: WaitingMessage) -> WaitingView:
        """View what a broker lists."""
        return cls(
            deliver_at=waiting.deliver_at_ms,
            destination=waiting.topic,
            recall_handle=waiting.recall_handle,
            delay_level=waiting.delay_level,
            message=MessageView.of(waiting.message),
        )


class SendView(Value, frozen=True, kw_only=True):
    """What a broker said about a sent message."""

    send_status: str
    msg_id: str
    offset_msg_id: str
    broker_name: str
    queue_id: int
    queue_offset: int
    recall_handle: str | None = None

    @classmethod
    def of(cls, result: SendResult) -> SendView:
        """View a producer's result."""
        return cls(
            send_status=result.status.name,
            msg_id=result.msg_id,
            offset_msg_id=result.offset_msg_id,
            broker_name=result.queue.broker_name,
            queue_id=result.queue.queue_id,
            queue_offset=result.queue_offset,
            recall_handle=result.recall_handle,
        )


# -- servers


class BrokerSettings(dict[str, str]):
    """Every setting of a broker by its key, as text. without_effect: keys that it accepts and does not
    use; empty for Apache's brokers."""

    without_effect: frozenset[str] = frozenset()


class SettingsChange(Value, frozen=True, kw_only=True):
    """What became of settings sent to a broker. Apache's brokers report none of these.

    at_next_start: keys that count from then on. unknown: keys that it ignored. without_effect: keys that it
    accepts and does not use. not_written: it has no settings file, and forgets them at its next start.
    """

    broker_addr: str
    at_next_start: list[str] = []
    unknown: list[str] = []
    without_effect: list[str] = []
    not_written: bool = False


class PermChange(Value, frozen=True, kw_only=True):
    """Topics whose write permission a name server took or gave; `problem` where it did not."""

    namesrv: str
    broker_name: str
    topics: int
    problem: str = ""


class StatsSpan(Value, frozen=True, kw_only=True):
    """What was counted in a span, and how much that is a second."""

    sum: int
    tps: float


class Stats(Value, frozen=True, kw_only=True):
    """What a broker counted in its last minute, hour and day."""

    minute: StatsSpan
    hour: StatsSpan
    day: StatsSpan

    @property
    def most(self) -> int:
        """The longest span that has counted anything: a broker that runs for an hour has no day yet."""
        return self.day.sum or self.hour.sum or self.minute.sum


class TopicStats(Value, frozen=True, kw_only=True):
    """How busy a topic is, and one of its groups ("": it has none).

    Rates are of the last minute, counts of 24 hours or since the broker runs. Values are None where no broker
    answers.
    """

    topic: str
    consumer_group: str
    accumulation: int | None
    in_tps: float | None
    out_tps: float | None
    in_msg_24_hours: int | None
    out_msg_24_hours: int | None


# -- groups


class GroupConfig(Value, frozen=True, kw_only=True):
    """The settings of a group at a broker."""

    cluster_name: str
    broker_name: str
    config: SubscriptionGroupConfig


class GroupQueueProgress(Value, frozen=True, kw_only=True):
    """How far a group is in a queue, of all groups of a broker."""

    group: str
    queue: QueueProgress


class Undone(Value, frozen=True, kw_only=True):
    """What a group has left in a topic: in all queues, in the one with most, how much older its last message
    is than the topic's, and how many messages its listeners failed in the last hour."""

    consumer_group: str
    topic: str
    undone_msgs_total: int
    undone_msgs_single_mq: int = msgspec.field(name="undoneMsgsSingleMQ")
    undone_msgs_delay_time_mills: int
    failed_msgs_total_recently: int


class OffsetWay(StrEnum):
    """How offsets are set. MEMBERS: the broker tells the members (222). STORED: at the broker, which members
    ask when they start (15)."""

    MEMBERS = "MEMBERS"
    STORED = "STORED"


class QueueReset(Value, frozen=True, kw_only=True):
    """One queue of a reset. consumer_offset: before (-1: none); target: of the time; rollback_offset: what
    the group was set to; seen: what it has since (None: the members have not said it). problem: why it is not
    as it should be."""

    broker_name: str
    queue_id: int
    way: OffsetWay
    broker_offset: int
    consumer_offset: int
    target: int
    rollback_offset: int
    seen: int | None = None
    problem: str = ""


class SendTime(Value, frozen=True, kw_only=True):
    """A send that was measured; `result` is its status, or the error's text."""

    broker_name: str
    queue_id: int
    sent: bool
    result: str
    millis: float
    msg_id: str = ""
    offset_msg_id: str = ""
    queue_offset: int = -1
