"""Typed command headers: the ext fields of each request and response, named as Python names them.

Each class is one Java header class; the wire names are its field names. A field without default is one
without which no broker can do anything with the request; a missing optional field is None, whatever RocketMQ
declares mandatory (remoting.md 1.8: nothing is enforced there).
"""

from __future__ import annotations

from msgspec import field

from cometmq.protocol.ext import I32, I64
from cometmq.protocol.ext import Header as Header
from cometmq.protocol.ext import decode_ext as decode_ext
from cometmq.protocol.ext import encode_ext as encode_ext

# -- sending


class SendMessageRequestHeader(Header, gc=False):
    """Codes 10 and 324 (whole names); base of the single-letter form. born_timestamp in ms."""

    topic: str
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    producer_group: str | None = None
    default_topic: str | None = None
    default_topic_queue_nums: I32 | None = None
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = None
    max_reconsume_times: I32 | None = None
    batch: bool | None = None
    bname: str | None = None


class SendMessageRequestHeaderV2(SendMessageRequestHeader, gc=False):
    """Codes 310, 320 and 325: the same fields under single letters."""

    topic: str = field(name="b")
    queue_id: I32 = field(name="e")
    sys_flag: I32 = field(name="f")
    born_timestamp: I64 = field(name="g")
    flag: I32 = field(name="h")
    producer_group: str | None = field(name="a", default=None)
    default_topic: str | None = field(name="c", default=None)
    default_topic_queue_nums: I32 | None = field(name="d", default=None)
    properties: str | None = field(name="i", default=None)
    reconsume_times: I32 | None = field(name="j", default=None)
    unit_mode: bool | None = field(name="k", default=None)
    max_reconsume_times: I32 | None = field(name="l", default=None)
    batch: bool | None = field(name="m", default=None)
    bname: str | None = field(name="n", default=None)


class SendMessageResponseHeader(Header, gc=False):
    """Answer to a send. msg_id: the offset id, several joined by commas for a batch."""

    msg_id: str
    queue_id: I32
    queue_offset: I64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    region: str | None = field(name="MSG_REGION", default=None)
    trace_on: str | None = field(name="TRACE_ON", default=None)


class ConsumerSendMsgBackRequestHeader(Header, gc=False):
    """Code 36. offset: physical offset on the broker that is addressed."""

    offset: I64
    group: str
    delay_level: I32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: I32 | None = None
    bname: str | None = None


class EndTransactionRequestHeader(Header, gc=False):
    """Code 37. commit_or_rollback: 8 commit, 12 rollback, 0 unknown."""

    producer_group: str
    tran_state_table_offset: I64
    commit_log_offset: I64
    commit_or_rollback: I32
    from_transaction_check: bool | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    topic: str | None = None
    bname: str | None = None


class CheckTransactionStateRequestHeader(Header, gc=False):
    """Code 39, broker to producer."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    topic: str | None = None
    bname: str | None = None


# -- pulling


class PullMessageRequestHeader(Header, gc=False):
    """Codes 11 and 361. sys_flag: codes.PullSysFlag; proxy_froward_client_id is RocketMQ's own spelling."""

    consumer_group: str
    topic: str
    queue_id: I32
    queue_offset: I64
    max_msg_nums: I32
    sys_flag: I32
    commit_offset: I64 | None = None
    suspend_timeout_millis: I64 | None = None
    subscription: str | None = None
    sub_version: I64 | None = None
    expression_type: str | None = None
    bname: str | None = None
    max_msg_bytes: I32 | None = None
    request_source: I32 | None = None
    proxy_froward_client_id: str | None = None


class PullMessageResponseHeader(Header, gc=False):
    """Answer to a pull, on codes 0, 19, 20 and 21."""

    suggest_which_broker_id: I64
    next_begin_offset: I64
    min_offset: I64
    max_offset: I64


# -- offsets


class QueryConsumerOffsetRequestHeader(Header, gc=False):
    """Code 14."""

    consumer_group: str
    topic: str
    queue_id: I32
    set_zero_if_not_found: bool | None = None
    bname: str | None = None


class UpdateConsumerOffsetRequestHeader(Header, gc=False):
    """Code 15."""

    consumer_group: str
    topic: str
    queue_id: I32
    commit_offset: I64
    bname: str | None = None


class GetMaxOffsetRequestHeader(Header, gc=False):
    """Code 30."""

    topic: str
    queue_id: I32
    committed: bool | None = None
    bname: str | None = None


class GetMinOffsetRequestHeader(Header, gc=False):
    """Code 31."""

    topic: str
    queue_id: I32
    bname: str | None = None


class GetEarliestMsgStoretimeRequestHeader(Header, gc=False):
    """Code 32."""

    topic: str
    queue_id: I32
    bname: str | None = None


class SearchOffsetRequestHeader(Header, gc=False):
    """Code 29. timestamp in ms; boundary_type LOWER or UPPER (5.x)."""

    topic: str
    queue_id: I32
    timestamp: I64
    boundary_type: str | None = None
    bname: str | None = None


class OffsetResponseHeader(Header, gc=False):
    """Answer to 14, 29, 30 and 31."""

    offset: I64


class GetEarliestMsgStoretimeResponseHeader(Header, gc=False):
    """Answer to 32: store time of the first message in ms, -1 without one."""

    timestamp: I64


# -- queries


class QueryMessageRequestHeader(Header, gc=False):
    """Code 12. Whether the key is a unique key stands in another ext field, `_UNIQUE_KEY_QUERY`."""

    topic: str
    key: str
    max_num: I32
    begin_timestamp: I64
    end_timestamp: I64
    unique_key_query: bool | None = field(name="_UNIQUE_KEY_QUERY", default=None)


class QueryMessageResponseHeader(Header, gc=False):
    """Answer to 12."""

    index_last_update_timestamp: I64
    index_last_update_phyoffset: I64


class ViewMessageRequestHeader(Header, gc=False):
    """Code 33. offset: physical offset."""

    offset: I64
    topic: str | None = None


# -- clients and groups


class UnregisterClientRequestHeader(Header, gc=False):
    """Code 35."""

    client_id: str = field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class GetConsumerListByGroupRequestHeader(Header, gc=False):
    """Code 38."""

    consumer_group: str
    bname: str | None = None


class NotifyConsumerIdsChangedRequestHeader(Header, gc=False):
    """Code 40, broker to client."""

    consumer_group: str


class GetConsumerConnectionListRequestHeader(Header, gc=False):
    """Code 203."""

    consumer_group: str


class GetProducerConnectionListRequestHeader(Header, gc=False):
    """Code 204."""

    producer_group: str


class GetConsumeStatsRequestHeader(Header, gc=False):
    """Code 208. topic empty or absent: all."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetConsumerRunningInfoRequestHeader(Header, gc=False):
    """Code 307."""

    consumer_group: str
    client_id: str
    jstack_enable: bool | None = None


class ConsumeMessageDirectlyRequestHeader(Header, gc=False):
    """Code 309. msg_id: offset id."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: I32 | None = None
    group_sys_flag: I32 | None = None


class ResetOffsetRequestHeader(Header, gc=False):
    """Codes 220 and 222. timestamp -1: to the end."""

    topic: str
    group: str
    timestamp: I64
    is_force: bool | None = None
    queue_id: I32 | None = None
    offset: I64 | None = None


class GetConsumerStatusRequestHeader(Header, gc=False):
    """Codes 221 and 223."""

    topic: str
    group: str
    client_addr: str | None = None


class TopicRequestHeader(Header, gc=False):
    """Any request whose only field is a topic (202, 300, 305 ...)."""

    topic: str


class GetTopicStatsInfoRequestHeader(TopicRequestHeader, gc=False):
    """Code 202."""


class QueryTopicConsumeByWhoRequestHeader(TopicRequestHeader, gc=False):
    """Code 300."""


class QueryConsumeTimeSpanRequestHeader(Header, gc=False):
    """Code 303."""

    topic: str
    group: str


class QueryCorrectionOffsetRequestHeader(Header, gc=False):
    """Code 308."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class CloneGroupOffsetRequestHeader(Header, gc=False):
    """Code 314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class ViewBrokerStatsDataRequestHeader(Header, gc=False):
    """Code 315."""

    stats_name: str
    stats_key: str


class GetBrokerConsumeStatsRequestHeader(Header, gc=False):
    """Code 317."""

    is_order: bool | None = None


class QueryConsumeQueueRequestHeader(Header, gc=False):
    """Code 321."""

    topic: str
    queue_id: I32
    index: I64
    count: I32
    consumer_group: str | None = None


class MessageIdRequestHeader(Header, gc=False):
    """Code 323. msg_id: offset id."""

    msg_id: str


# -- topics and subscription groups on a broker


class CreateTopicRequestHeader(Header, gc=False):
    """Code 17. topic_filter_type: SINGLE_TAG or MULTI_TAG."""

    topic: str
    read_queue_nums: I32
    write_queue_nums: I32
    perm: I32
    default_topic: str | None = None
    topic_filter_type: str | None = None
    topic_sys_flag: I32 | None = None
    order: bool | None = None
    attributes: str | None = None
    force: bool | None = None


class DeleteTopicRequestHeader(Header, gc=False):
    """Codes 215 and 216; with a cluster's name only that cluster's brokers forget it (216)."""

    topic: str
    cluster_name: str | None = None


class DeleteSubscriptionGroupRequestHeader(Header, gc=False):
    """Code 207. 4.9 says removeOffset, 5.x cleanOffset."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None


class GetAllSubscriptionGroupRequestHeader(Header, gc=False):
    """Code 201, paged by 5.x."""

    group_seq: I32 | None = None
    max_group_num: I32 | None = None
    data_version: str | None = None


class GetBrokerConfigResponseHeader(Header, gc=False):
    """Answer to 26. version: data version in JSON."""

    version: str


# -- name server


class GetRouteInfoRequestHeader(Header, gc=False):
    """Code 105."""

    topic: str
    accept_standard_json_only: bool | None = None


class RegisterBrokerRequestHeader(Header, gc=False):
    """Code 103. body_crc32: of the body as sent, top bit cleared; 0 or absent: not to be checked."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64
    ha_server_addr: str | None = None
    compressed: bool | None = None
    body_crc32: I32 | None = None
    heartbeat_timeout_millis: I64 | None = None
    enable_acting_master: bool | None = None
    zone_name: str | None = None


class RegisterBrokerResponseHeader(Header, gc=False):
    """Answer to 103: both only for a registrant that is not the master."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class UnregisterBrokerRequestHeader(Header, gc=False):
    """Code 104."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class QueryDataVersionRequestHeader(UnregisterBrokerRequestHeader, gc=False):
    """Code 322."""


class QueryDataVersionResponseHeader(Header, gc=False):
    """Answer to 322."""

    changed: bool


class PutKVConfigRequestHeader(Header, gc=False):
    """Code 100."""

    namespace: str
    key: str
    value: str


class GetKVConfigRequestHeader(Header, gc=False):
    """Codes 101 and 102."""

    namespace: str
    key: str


class DeleteKVConfigRequestHeader(GetKVConfigRequestHeader, gc=False):
    """Code 102."""


class GetKVConfigResponseHeader(Header, gc=False):
    """Answer to 101."""

    value: str | None = None


class GetKVListByNamespaceRequestHeader(Header, gc=False):
    """Code 219."""

    namespace: str


class BrokerNameRequestHeader(Header, gc=False):
    """Codes 205 and 327."""

    broker_name: str


class WipeWritePermOfBrokerRequestHeader(BrokerNameRequestHeader, gc=False):
    """Code 205."""


class WipeWritePermOfBrokerResponseHeader(Header, gc=False):
    """Answer to 205."""

    wipe_topic_count: I32


class AddWritePermOfBrokerRequestHeader(BrokerNameRequestHeader, gc=False):
    """Code 327."""


class AddWritePermOfBrokerResponseHeader(Header, gc=False):
    """Answer to 327."""

    add_topic_count: I32


class GetTopicsByClusterRequestHeader(Header, gc=False):
    """Code 224."""

    cluster: str


class RegisterTopicRequestHeader(TopicRequestHeader, gc=False):
    """Code 217 (5.x)."""


class GetBrokerMemberGroupRequestHeader(Header, gc=False):
    """Code 901 (5.x)."""

    cluster_name: str
    broker_name: str


class BrokerHeartbeatRequestHeader(Header, gc=False):
    """Code 904 (5.x). heartbeat_timeout_mills is RocketMQ's own spelling."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: I64 | None = None
    epoch: I32 | None = None
    max_offset: I64 | None = None
    confirm_offset: I64 | None = None
    heartbeat_timeout_mills: I64 | None = None
    election_priority: I32 | None = None


class RegisterFilterServerRequestHeader(Header, gc=False):
    """Code 301."""

    filter_server_addr: str


class RegisterFilterServerResponseHeader(Header, gc=False):
    """Answer to 301."""

    broker_name: str
    broker_id: I64
