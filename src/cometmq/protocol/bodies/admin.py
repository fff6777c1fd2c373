"""Bodies of administration requests: statistics, connections, offset tables.

See docs/reference/remoting.md, Statistics and connections.
"""

from __future__ import annotations

from typing import Any

from cometmq.message import MessageQueue
from cometmq.protocol.bodies.client import SubscriptionData
from cometmq.protocol.bodies.route import DataVersion
from cometmq.protocol.codes import language_name
from cometmq.protocol.json_body import Body, IntegerKeyed, QueueKeyed, always, empty
from cometmq.protocol.lenient import Json


class TopicOffset(Body):
    """The offsets of one queue: `min_offset` <= offset < `max_offset`. `last_update_timestamp` is in ms."""

    min_offset: int = always(0)
    max_offset: int = always(0)
    last_update_timestamp: int = always(0)


class TopicStatsTable(QueueKeyed):
    """The offsets of the queues of a topic (response to request 202)."""

    offset_table: dict[MessageQueue, TopicOffset] = empty(dict)
    topic_put_tps: float | None = None


class PurgedQueue(Body):
    """One purged queue: its minimum offset before and after the purge, and its maximum offset."""

    queue_id: int = always(0)
    min_offset: int = always(0)
    purged_to: int = always(0)
    max_offset: int = always(0)

    @property
    def count(self) -> int:
        """The number of messages that the purge hides."""
        return self.purged_to - self.min_offset


class PurgeResult(Body):
    """The result of a purge or of its dry run (response to request 21001): the purged queues by queue id."""

    queues: list[PurgedQueue] = empty(list)


class OffsetWrapper(Body):
    """A group's progress in one queue.

    `last_timestamp` is the store time (ms) of the last consumed message. `pull_offset` is the offset of the
    next message that the group will receive, if the broker knows it.

    The last two fields are CometMQ's own, for groups that pop: `leased` is the number of leased messages, and
    `oldest_pop_time` is the time (epoch ms) at which the first of them was delivered.
    """

    broker_offset: int = always(0)
    consumer_offset: int = always(0)
    last_timestamp: int = always(0)
    pull_offset: int | None = None
    leased: int | None = None
    oldest_pop_time: int | None = None


class ConsumeStats(QueueKeyed):
    """A group's progress in each queue (response to request 208). `consume_tps` is in messages per second."""

    offset_table: dict[MessageQueue, OffsetWrapper] = empty(dict)
    consume_tps: float = always(0.0)


class BrokerConsumeStats(QueueKeyed):
    """The progress of all groups of a broker by topic (response to request 317)."""

    broker_addr: str = always("")
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = empty(list)
    total_diff: int = always(0)


class BrokerStatsItem(Body):
    """A statistic over a period: `tps` in events per second, `avgpt` the average value of an event."""

    sum: int = always(0)
    tps: float = always(0.0)
    avgpt: float = always(0.0)


class BrokerStatsData(Body):
    """A statistic over the last minute, hour and day (response to request 315)."""

    stats_minute: BrokerStatsItem = empty(BrokerStatsItem)
    stats_hour: BrokerStatsItem = empty(BrokerStatsItem)
    stats_day: BrokerStatsItem = empty(BrokerStatsItem)


# -- connections


class ClientConnection(Body):
    """One client. `client_addr` is "ip:port".

    The last four fields are CometMQ's own. `max_reconsume_times` is the limit of redeliveries that the
    consumer sent when it last handed a message back. `subscriptions` maps a topic to its expression.
    `settings` holds `messageModel` and `consumeFromWhere` from the client's heartbeat. `grpc_type` is the
    type of a client that uses gRPC, such as SIMPLE_CONSUMER.
    """

    client_id: str = always("")
    client_addr: str = always("")
    language: str = always("OTHER")
    version: int = always(0)
    max_reconsume_times: int | None = None
    subscriptions: dict[str, str] | None = None
    settings: dict[str, str] | None = None
    grpc_type: str | None = None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        language = value.get("language")
        return {**value, "language": language_name(language)} if isinstance(language, int) else value


class ConsumerConnection(Body):
    """The members and subscriptions of a group (request 203). `retry_max_times` is CometMQ's own field."""

    connection_set: list[ClientConnection] = empty(list)
    subscription_table: dict[str, SubscriptionData] = empty(dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None
    retry_max_times: int | None = None


class QueryCorrectionOffsetBody(IntegerKeyed):
    """The lowest consumer offset of a topic's groups, by queue id (response to request 308)."""

    correction_offsets: dict[int, int] = empty(dict)


class ProducerConnection(Body):
    """The clients of a producer group (response to request 204)."""

    connection_set: list[ClientConnection] = empty(list)


class ProducerInfo(Body):
    """A client of a producer group (request 328). `grpc_type`, CometMQ's own, is PRODUCER if it uses gRPC."""

    client_id: str = always("")
    remote_ip: str = always("", name="remoteIP")
    language: str = always("OTHER")
    version: int = always(0)
    last_update_timestamp: int = always(0)
    grpc_type: str | None = None


class ProducerTableInfo(Body):
    """All producer groups that are connected to a broker (response to request 328)."""

    data: dict[str, list[ProducerInfo]] = empty(dict)


class GroupList(Body):
    """The groups that consume a topic (response to request 300)."""

    group_list: list[str] = empty(list)


# -- stored data


class ConsumeQueueData(Body):
    """One entry of a consume queue."""

    physic_offset: int = always(0)
    physic_size: int = always(0)
    tags_code: int = always(0)
    eval: bool = always(False)
    msg: str | None = None
    extend_data_json: str | None = None
    bit_map: str | None = None


class QueryConsumeQueueBody(Body):
    """Entries of a consume queue (response to request 321)."""

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueData] = empty(list)
    max_queue_index: int = always(0)
    min_queue_index: int = always(0)


class ConsumeTimeSpan(Body):
    """The time range in which the messages of one queue were stored (part of the response to request 303)."""

    message_queue: MessageQueue
    min_time_stamp: int = always(0)
    max_time_stamp: int = always(0)
    consume_time_stamp: int = always(0)
    delay_time: int = always(0)
    min_time_stamp_str: str | None = None
    max_time_stamp_str: str | None = None
    consume_time_stamp_str: str | None = None


class QueryConsumeTimeSpanBody(Body):
    """The time range in which messages were stored, for each queue of a topic (response to request 303)."""

    consume_time_span_set: list[ConsumeTimeSpan] = empty(list)


# -- tables that slaves copy, and the files in the store's config directory


class ConsumerOffsetTable(IntegerKeyed):
    """Consumer offsets by "topic@group" and queue id (response to request 43, `consumerOffset.json`).

    `min_offsets` is CometMQ's own field for slaves. It lists the queues whose first messages an operator has
    hidden. For each topic, it has pairs of a queue id and the offset of the first visible message. It has
    pairs, because a slave of 5.5 cannot skip an unknown map with integer keys. `online_groups` is CometMQ's
    own field for tools: the groups that have members.
    """

    offset_table: dict[str, dict[int, int]] = empty(dict)
    data_version: DataVersion | None = None
    min_offsets: dict[str, list[tuple[int, int]]] | None = None
    online_groups: list[str] | None = None


class DelayOffsetTable(IntegerKeyed):
    """The next offset to deliver by delay level: response to request 45, delayOffset.json (docs/store.md)."""

    offset_table: dict[int, int] = empty(dict)
    data_version: DataVersion | None = None
    log_position: int | None = None


# -- replication


class HaConnectionInfo(Body):
    """A slave's connection as the master sees it (response to request 907). `diff` is its lag in bytes."""

    addr: str
    slave_ack_offset: int
    diff: int
    in_sync: bool
    transferred_byte_in_second: int = always(0)
    transfer_from_where: int = always(0)


class HaClientInfo(Body):
    """A slave's connection as the slave itself sees it (response to request 907). Times are in ms."""

    master_addr: str | None = None
    transferred_byte_in_second: int = always(0)
    max_offset: int = always(0)
    last_read_timestamp: int = always(0)
    last_write_timestamp: int = always(0)
    master_flush_offset: int = always(0)
    activated: bool = always(False)


class HaRuntimeInfo(Body):
    """What `haStatus` shows (request 907). `problem`, CometMQ's own, is why no slave can connect, or None."""

    master: bool
    master_commit_log_max_offset: int = always(0)
    in_sync_slave_nums: int = always(0)
    ha_connection_info: list[HaConnectionInfo] = empty(list)
    ha_client_runtime_info: HaClientInfo = empty(HaClientInfo)
    problem: str | None = None


class RaftMemberInfo(Body):
    """One member of a raft group. Unknown values are -1.

    `match` is the index of the last entry that the member holds, as far as the leader knows. `silent_ms` is
    the time since the member last responded to the leader.
    """

    member: str
    voter: bool
    match: int = always(-1)
    silent_ms: int = always(-1)


class RaftStatus(Body):
    """A raft group as a member sees it (CometMQ's request 21003). An index of -1 means no entry."""

    member: str = always("")
    role: str = always("")
    term: int = always(0)
    leader: str = always("")
    first: int = always(-1)
    last: int = always(-1)
    durable: int = always(-1)
    committed: int = always(-1)
    members: list[RaftMemberInfo] = empty(list)


# -- timers


class TimerMetric(Body):
    """How many timer messages of a topic wait for delivery. `time_stamp` is when that last changed, in ms."""

    count: int = always(0)
    time_stamp: int = always(0)


class TimerMetrics(Body):
    """The timer messages that wait for delivery, counted by topic (response to request 61)."""

    timing_count: dict[str, TimerMetric] = empty(dict)
    data_version: DataVersion | None = None


# -- accounts


class AclAccount(Body):
    """An account of an access file, without its secret. Permissions are as in `plain_acl.yml`."""

    access_key: str = always("")
    white_remote_address: str = always("")
    admin: bool = always(False)
    default_topic_perm: str = always("")
    default_group_perm: str = always("")
    topic_perms: list[str] = empty(list)
    group_perms: list[str] = empty(list)
    rate_limits: list[str] = empty(list)
    file: str = always("")


class AclAccounts(Body):
    """The accounts of a broker and its global white lists, by file (response to CometMQ's request 21006)."""

    accounts: list[AclAccount] = empty(list)
    global_white_remote_addresses: dict[str, list[str]] = empty(dict)


# -- lite topics


class LiteBrokerInfo(Body):
    """The lite topics of a broker (response to request 200074).

    Attributes:
        max_lmq_num, current_lmq_num: The number of lite topics, and its maximum.
        lite_subscription_count: The number of subscriptions of all clients.
        order_info_count: The number of lite topics with leased messages, counted for each group.
        cq_table_size: The number of the other queues.
        offset_table_size: The number of consumer offsets in other queues.
        event_map_size: The number of clients with subscriptions.
        topic_meta: The parent topics, with the minutes after which their silent lite topics expire, or -1.
        group_meta: The groups that are bound to each parent topic.
    """

    store_type: str = always("default")
    max_lmq_num: int = always(0)
    current_lmq_num: int = always(0)
    lite_subscription_count: int = always(0)
    order_info_count: int = always(0)
    cq_table_size: int = always(0)
    offset_table_size: int = always(0)
    event_map_size: int = always(0)
    topic_meta: dict[str, int] = empty(dict)
    group_meta: dict[str, list[str]] = empty(dict)


class ParentTopicInfo(Body):
    """A parent topic (response to request 200075). `lmq_num` counts the lite topics of all parents."""

    topic: str = always("")
    ttl: int = always(-1)
    groups: list[str] = empty(list)
    lmq_num: int = always(0)
    lite_topic_count: int = always(0)


class LiteSubscriber(Body):
    """A client that subscribes to a lite topic, and its group."""

    client_id: str = always("")
    group: str = always("")


class LiteTopicInfo(Body):
    """A lite topic (response to request 200076)."""

    parent_topic: str = always("")
    lite_topic: str = always("")
    subscriber: list[LiteSubscriber] = empty(list)
    topic_offset: TopicOffset = empty(TopicOffset)
    sharding_to_broker: bool = always(True)


class LiteClientInfo(Body):
    """A client of lite topics (response to request 200077).

    `lite_topic_count` is -1 for an unknown client. `lite_topic_set` contains queue names. Times are in epoch
    ms, or -1 if they are unknown.
    """

    parent_topic: str = always("")
    group: str = always("")
    client_id: str = always("")
    last_access_time: int = always(-1)
    last_consume_time: int = always(-1)
    lite_topic_count: int = always(-1)
    lite_topic_set: list[str] = empty(list)


class LiteTopicState(Body):
    """A lite topic in a list: its last message (epoch ms), and the lags of groups that use it."""

    lite_topic: str = always("")
    min_offset: int = always(0)
    max_offset: int = always(0)
    stored_ms: int = always(0)
    subscribers: int = always(0)
    lags: dict[str, int] = empty(dict)


class LiteTopicList(Body):
    """The first lite topics of a parent in the order of names, and whether there are more (request 21010)."""

    topics: list[LiteTopicState] = empty(list)
    more: bool = always(False)


class LiteLag(Body):
    """The lag of a group in a lite topic, and the store time (epoch ms) of the first unconsumed message."""

    lite_topic: str = always("")
    lag_count: int = always(0)
    earliest_unconsumed_timestamp: int = always(-1)


class LiteGroupInfo(Body):
    """The progress of a group in its lite topics, or in one of them (response to request 200078).

    Attributes:
        total_lag_count: The lag in all lite topics or in the one; -1 if the lite topic does not exist.
        earliest_unconsumed_timestamp: The store time (epoch ms) of the first unconsumed message, or -1.
        lite_topic_offset_wrapper: The offsets in the requested lite topic, once the group has consumed.
        lag_count_top_k, lag_timestamp_top_k: The lite topics with the largest lag, and with the oldest
            unconsumed messages.
    """

    group: str = always("")
    parent_topic: str = always("")
    lite_topic: str | None = None
    earliest_unconsumed_timestamp: int = always(-1)
    total_lag_count: int = always(0)
    lite_topic_offset_wrapper: OffsetWrapper | None = None
    lag_count_top_k: list[LiteLag] | None = None
    lag_timestamp_top_k: list[LiteLag] | None = None
