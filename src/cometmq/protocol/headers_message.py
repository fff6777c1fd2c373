"""Headers of sends, transactions, pulls, offsets and queries
(docs/reference/remoting.md, Sending, Transactions, Pulling, Send back, Consumer offsets, Queries)."""

from __future__ import annotations

from msgspec import field

from cometmq.protocol.ext import I32, I64, Header

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


class RecallMessageRequestHeader(Header, gc=False):
    """Code 370. recall_handle: from the answer to the send; one that is missing is refused as no handle."""

    topic: str
    recall_handle: str | None = None
    producer_group: str | None = None
    bname: str | None = None


class RecallMessageResponseHeader(Header, gc=False):
    """Answer to 370: the unique key of the message."""

    msg_id: str


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


# -- transactions


class EndTransactionRequestHeader(Header, gc=False):
    """Code 37. commit_or_rollback: 8 commit, 12 roll back, 0 unknown; both offsets are those of the half
    message."""

    producer_group: str
    tran_state_table_offset: I64
    commit_log_offset: I64
    commit_or_rollback: I32
    from_transaction_check: bool | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    bname: str | None = None
    topic: str | None = None


class CheckTransactionStateRequestHeader(Header, gc=False):
    """Code 39, broker to client. msg_id, transaction_id: the unique key."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None
    topic: str | None = None


class ResumeCheckHalfMessageRequestHeader(Header, gc=False):
    """Code 323. msg_id: offset id; CometMQ's broker takes the unique key too."""

    msg_id: str
    topic: str | None = None
    bname: str | None = None


# -- pulling


class PullMessageRequestHeader(Header, gc=False):
    """Codes 11 and 361. sys_flag: codes.PullSysFlag; proxy_froward_client_id is RocketMQ's own spelling.

    bulk is ours: a reader of whole topics wants large answers (docs/reference/remoting.md, Pulling)."""

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
    bulk: bool | None = None


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


class ViewMessageRequestHeader(Header, gc=False):
    """Code 33. offset: physical offset."""

    offset: I64
    topic: str | None = None
