"""Results of the administration operations.

In JSON (`--json`) the fields have RocketMQ's camel-case names. Times are milliseconds since the Unix epoch; 0
means no time. Offsets count the messages of a queue.
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
    """Base class of the results: immutable, camel-case names in JSON."""


class QueueStatus(Value, frozen=True, kw_only=True):
    """State of one queue of a topic at one broker."""

    broker_name: str
    queue_id: int
    min_offset: int
    max_offset: int
    last_update_timestamp: int


class TopicUse(Value, frozen=True, kw_only=True):
    """A topic with its cluster and the groups that have offsets for the topic."""

    cluster_name: str
    topic: str
    consumer_groups: list[str]


class BrokerStatus(Value, frozen=True, kw_only=True):
    """A broker process with its runtime table (GET_BROKER_RUNTIME_INFO).

    Attributes:
        role: SYNC_MASTER, ASYNC_MASTER, SLAVE or a raft role. MASTER or SLAVE if the broker reports no role.
        lag: Bytes of log by which the broker is behind its master or leader. None for a master, and if the
            broker or its master did not answer.
        problem: Error of a broker that did not answer.
        received_ms: When the runtime table was received, in ms since 1970, by this machine's clock.
    """

    cluster_name: str
    broker_name: str
    broker_id: int
    broker_addr: str
    runtime: dict[str, str]
    role: str = ""
    lag: int | None = None
    problem: str = ""
    received_ms: int | None = None

    def first_number(self, key: str) -> float | None:
        """Return the first number of an entry of the runtime table.

        An entry may consist of several numbers. For example, rates have three: for the last 10, 60 and
        600 s. The result is None if the table does not contain `key`, or if the entry does not begin with a
        finite number.
        """
        try:
            number = float(self.runtime.get(key, "").split()[0])
        except (IndexError, ValueError):
            return None
        return number if isfinite(number) else None

    def count(self, key: str) -> int:
        """Return a counter of the runtime table, 0 if the broker does not have it."""
        try:
            number = int(self.runtime.get(key, ""))
        except ValueError:
            return 0
        return number if -(2**63) <= number < 2**63 else 0

    def with_runtime(self, runtime: dict[str, str]) -> BrokerStatus:
        """Return a copy of this status that contains a runtime table, and the role that the table reports."""
        return msgspec.structs.replace(self, runtime=runtime, role=role_of(runtime, self.broker_id))


def broker_places(info: ClusterInfo, cluster: str | None = None) -> list[BrokerStatus]:
    """Return every broker of one cluster, or of all clusters, without runtime tables."""
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
    """Return a broker's role, from its runtime table or its id; "" for a broker that did not answer."""
    if not runtime:
        return ""
    by_id = "MASTER" if broker_id == MASTER_ID else "SLAVE"
    return runtime.get("raftRole") or runtime.get("brokerRole") or by_id


def with_lags(brokers: list[BrokerStatus]) -> list[BrokerStatus]:
    """Return copies of the brokers with the replication lag of each."""
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
    """Consumer offset and broker offset of a group in one queue.

    Attributes:
        leased: Number of leased messages of a group that pops. None: the group pulls, or the broker does not
            report it.
        oldest_pop_ms: Time (epoch ms) at which the first leased message was delivered. None: no message is
            leased.
    """

    topic: str
    broker_name: str
    queue_id: int
    broker_offset: int
    consumer_offset: int
    last_timestamp: int
    client_ip: str = ""
    leased: int | None = None
    oldest_pop_ms: int | None = None

    @property
    def diff(self) -> int:
        """The lag: the number of messages between the consumer offset and the broker offset."""
        return self.broker_offset - self.consumer_offset


class GroupProgress(Value, frozen=True, kw_only=True):
    """Offsets of a group in all its queues, and the group's consumption rate.

    The rate is None if no broker reports a queue of the group or a rate above 0.
    """

    group: str
    consume_tps: float | None
    queues: list[QueueProgress]

    @property
    def diff_total(self) -> int | None:
        """The sum of the lags of all queues. None if brokers store no offset of the group.

        Brokers store no offsets of broadcasting groups: the members of these groups store them themselves.
        """
        return sum(queue.diff for queue in self.queues) if self.queues else None

    @property
    def leased_total(self) -> int | None:
        """The number of leased messages of a group that pops, else None."""
        found = [queue.leased for queue in self.queues if queue.leased is not None]
        return sum(found) if found else None


class GroupSummary(Value, frozen=True):
    """Summary of a consumer group.

    Version, type and model are empty without members. Count, version, rate and lag are None if unknown.
    """

    group: str
    count: int | None
    version: str | None
    consume_type: str
    message_model: str
    consume_tps: int | None
    diff_total: int | None


def known_sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values that are not None. If all are None, return None."""
    found = [value for value in values if value is not None]
    return sum(found) if found else None


class RetryLimits(Value, frozen=True, kw_only=True):
    """Maximum retries of a group.

    Attributes:
        group: The group's own `retryMaxTimes`.
        members: Maximum retries that each member sent with its last send-back, by client id. These values
            take precedence over the group's value.
    """

    group: int = RETRY_MAX_TIMES
    members: dict[str, int] = {}

    @property
    def differ(self) -> bool:
        """Whether the members' retry limits differ from each other, or from the group's `retryMaxTimes`.

        The default of `retryMaxTimes` does not count as a difference.
        """
        own = {self.group} - {RETRY_MAX_TIMES} if self.members else set()
        return len(own.union(self.members.values())) > 1


class MemberSubscriptions(Value, frozen=True, kw_only=True):
    """Subscriptions and settings of a member of a group.

    Attributes:
        subscriptions: Expression by topic.
        problem: Why the subscriptions are unknown.
        settings: `messageModel`, `consumeFromWhere` and `maxReconsumeTimes`, as far as known.
        queues: Queues that the member holds. None: not requested, unknown, or the group consumes by POP.
        grpc_type: Type of a member that uses gRPC, such as SIMPLE_CONSUMER; "" for other members.
        blocked: By queue: ms since a message of it was consumed, if over a minute while messages wait there.
    """

    client_id: str
    client_addr: str
    version: str
    subscriptions: dict[str, str]
    blocked: dict[str, int] = {}
    problem: str = ""
    settings: dict[str, str] = {}
    queues: list[MessageQueue] | None = None
    language: str = ""
    grpc_type: str = ""


class GroupSubscriptions(Value, frozen=True, kw_only=True):
    """Subscriptions of a group's members, and the differences between members.

    Attributes:
        members: The members.
        differences: For each topic whose subscription differs between members: the client ids by expression.
            The expression "" stands for members that do not subscribe to the topic.
        setting_differences: For each setting that differs between members: the client ids by value. The
            client id "" stands for the group's own `retryMaxTimes`.
        unbalanced: The queues that no member or several members hold, and these members' client ids, by
            "topic@broker:id". None: unknown.
        consume_type: How the members consume: CONSUME_PASSIVELY (push), CONSUME_ACTIVELY (pull), CONSUME_POP.
    """

    group: str
    members: list[MemberSubscriptions]
    differences: dict[str, dict[str, list[str]]]
    setting_differences: dict[str, dict[str, list[str]]] = {}
    unbalanced: dict[str, list[str]] | None = None
    consume_type: str = ""


class TrackType(StrEnum):
    """Consumption state of a message in a group."""

    CONSUMED = "CONSUMED"
    CONSUMED_BUT_FILTERED = "CONSUMED_BUT_FILTERED"
    PULL = "PULL"
    NOT_CONSUME_YET = "NOT_CONSUME_YET"
    NOT_ONLINE = "NOT_ONLINE"
    UNKNOWN = "UNKNOWN"


class MessageTrack(Value, frozen=True, kw_only=True):
    """Consumption state of a message in one group.

    If the state is unknown, `exception_desc` is the reason.
    """

    consumer_group: str
    track_type: TrackType
    exception_desc: str = ""


class MessageView(Value, frozen=True, kw_only=True):
    """A stored message in the form of the JSON output. A body that is not UTF-8 text is encoded as Base64."""

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
        """Return a message in the form of the JSON output, with its body decompressed."""
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
    """A dead letter.

    Attributes:
        original_topic: Topic of the original message.
        origin_msg_id: Offset id of the original message.
        resend_times: Number of resends before the message became this dead letter.
    """

    original_topic: str | None
    origin_msg_id: str
    resend_times: int

    @classmethod
    def of_dead_letter(
        cls, message: MessageExt, original_topic: str | None, origin_msg_id: str, resend_times: int
    ) -> DeadLetterView:
        """Return a dead letter in the form of the JSON output."""
        return cls(
            **msgspec.structs.asdict(MessageView.of(message)),
            original_topic=original_topic,
            origin_msg_id=origin_msg_id,
            resend_times=resend_times,
        )


class DeadLetterCount(Value, frozen=True, kw_only=True):
    """Number of a group's dead letters. If a broker does not report it, `problem` is the error."""

    group: str
    count: int
    last_update_timestamp: int
    problem: str = ""


class TraceView(Value, frozen=True, kw_only=True):
    """A trace record, the address of the client that sent it, and its store time."""

    trace: AnyTrace
    client_host: str
    store_timestamp: int


class WaitingView(Value, frozen=True):
    """A message that waits for its delivery time.

    `deliver_at` is the delivery time in ms since 1970. `delay_level` is 0 if the producer set a delivery time
    instead of a delay level.
    """

    deliver_at: int
    destination: str
    recall_handle: str | None
    delay_level: int
    message: MessageView

    @classmethod
    def of(cls, waiting: WaitingMessage) -> WaitingView:
        """Return the JSON output's form of a delayed message that a broker has listed."""
        view = MessageView.of(waiting.message)
        return cls(waiting.deliver_at_ms, waiting.topic, waiting.recall_handle, waiting.delay_level, view)


class SendView(Value, frozen=True, kw_only=True):
    """The result of a send."""

    send_status: str
    msg_id: str
    offset_msg_id: str
    broker_name: str
    queue_id: int
    queue_offset: int
    recall_handle: str | None = None

    @classmethod
    def of(cls, result: SendResult) -> SendView:
        """Return the result of a producer's send in the form of the JSON output."""
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
    """All settings of a broker as text, by key.

    `without_effect` contains the keys that the broker accepts but does not use; empty for Apache's brokers.
    """

    without_effect: frozenset[str] = frozenset()


class SettingsChange(Value, frozen=True, kw_only=True):
    """Effect of a settings change at a broker. Apache's brokers do not report these effects.

    Attributes:
        broker_addr: Address of the broker.
        at_next_start: Keys that take effect at the next start.
        unknown: Keys that the broker ignored.
        without_effect: Keys that the broker accepts but does not use.
        not_written: The broker has no settings file, so the changes are lost at its next start.
    """

    broker_addr: str
    at_next_start: list[str] = []
    unknown: list[str] = []
    without_effect: list[str] = []
    not_written: bool = False


class PermChange(Value, frozen=True, kw_only=True):
    """Number of topics whose write permission a name server changed. `problem` is the name server's error."""

    namesrv: str
    broker_name: str
    topics: int
    problem: str = ""


class StatsSpan(Value, frozen=True, kw_only=True):
    """A count in a period, and its rate per second."""

    sum: int
    tps: float


class Stats(Value, frozen=True, kw_only=True):
    """Counts of a broker's statistic, such as stored messages, in the last minute, hour and day."""

    minute: StatsSpan
    hour: StatsSpan
    day: StatsSpan

    @property
    def most(self) -> int:
        """The count of the last day or, where that is 0, of the last hour or else of the last minute.

        For example, a broker that has run for only an hour has no daily count yet.
        """
        return self.day.sum or self.hour.sum or self.minute.sum


class TopicStats(Value, frozen=True):
    """Rates and counts of a topic and one of its groups ("": the topic has no group).

    The rates are those of the last minute; None if no broker has counted a message in the last 24 hours. The
    counts cover the last 24 hours, or the time since the broker started if that is shorter. All values are
    None if no broker answers.
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
    """Settings of a group at a broker."""

    cluster_name: str
    broker_name: str
    config: SubscriptionGroupConfig


class GroupQueueProgress(Value, frozen=True, kw_only=True):
    """Offsets of a consumer group in one queue of a broker."""

    group: str
    queue: QueueProgress


class Undone(Value, frozen=True, kw_only=True):
    """Backlog and failures of a group in a topic.

    Attributes:
        undone_msgs_total: Lag in all queues, in messages.
        undone_msgs_single_mq: Lag in the queue with the largest lag, in messages.
        undone_msgs_delay_time_mills: Time, in ms, from the last consumed message of a queue to its last
            message. The maximum of all queues.
        failed_msgs_total_recently: Messages that listeners failed to consume in the last hour.
    """

    consumer_group: str
    topic: str
    undone_msgs_total: int
    undone_msgs_single_mq: int = msgspec.field(name="undoneMsgsSingleMQ")
    undone_msgs_delay_time_mills: int
    failed_msgs_total_recently: int


class SendTime(Value, frozen=True):
    """A measured send. `result` is the status of the send, or the text of its error."""

    broker_name: str
    queue_id: int
    sent: bool
    result: str
    millis: float
    msg_id: str = ""
    offset_msg_id: str = ""
    queue_offset: int = -1
