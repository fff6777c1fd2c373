"""Headers of sends, transactions, pulls, offsets and queries.

See docs/reference/remoting.md, Sending, Transactions, Pulling, Send back, Consumer offsets, Queries.
"""

from __future__ import annotations

from msgspec import field

from cometmq.protocol.ext import I32, I64, Header

# -- sending


class SendMessageRequestHeader(Header, gc=False):
    """The header of the send requests 10 and 324, which have the full field names."""

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
    """The header of the send requests 310, 320 and 325: request 10 with single-letter wire names."""

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
    """The header of the response to a send: the offset id, or those of a batch, joined by commas."""

    msg_id: str
    queue_id: I32
    queue_offset: I64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    first_msg_id: str | None = None  # Ours: for a duplicate, the unique key of the message that it repeats
    region: str | None = field(name="MSG_REGION", default=None)
    trace_on: str | None = field(name="TRACE_ON", default=None)


class RecallMessageRequestHeader(Header, gc=False):
    """The header of request 370, a recall. The client got `recall_handle` in the response to the send."""

    topic: str
    recall_handle: str | None = None
    producer_group: str | None = None
    bname: str | None = None


class RecallMessageResponseHeader(Header, gc=False):
    """The header of the response to request 370. `msg_id` is the unique key of the recalled message."""

    msg_id: str


class ConsumerSendMsgBackRequestHeader(Header, gc=False):
    """The header of request 36 (CONSUMER_SEND_MSG_BACK). `offset` is a position in the broker's log."""

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
    """The header of request 37 (END_TRANSACTION).

    `commit_or_rollback` is 8 to commit, 12 to roll back, and 0 if the outcome is unknown. Both offsets are
    those of the half message.
    """

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
    """The header of request 39, a broker's check of a transaction. Both message ids are the unique key."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None
    topic: str | None = None


class ResumeCheckHalfMessageRequestHeader(Header, gc=False):
    """The header of request 323. `msg_id` is an offset id. CometMQ's broker also accepts a unique key."""

    msg_id: str
    topic: str | None = None
    bname: str | None = None


# -- pulling


class PullMessageRequestHeader(Header, gc=False):
    """The header of requests 11 and 361 (pulls). `sys_flag` holds `PullSysFlag` bits.

    `proxy_froward_client_id` is RocketMQ's own spelling. `bulk` (CometMQ's own) requests large responses, for
    programs that read whole topics (docs/reference/remoting.md, Pulling).
    """

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
    """The header of the response to a pull, if its code is 0, 19, 20 or 21."""

    suggest_which_broker_id: I64
    next_begin_offset: I64
    min_offset: I64
    max_offset: I64


# -- offsets


class GroupQueueRequestHeader(Header, gc=False):
    """The header of request 200055 (POLLING_INFO), and the base of others about a group's work in a queue."""

    consumer_group: str
    topic: str
    queue_id: I32
    bname: str | None = None


class QueryConsumerOffsetRequestHeader(GroupQueueRequestHeader, gc=False):
    """The header of request 14 (QUERY_CONSUMER_OFFSET)."""

    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequestHeader(GroupQueueRequestHeader, gc=False, kw_only=True):
    """The header of request 15 (UPDATE_CONSUMER_OFFSET)."""

    commit_offset: I64


class QueueRequestHeader(Header, gc=False):
    """The header of requests 30, 31 and 32 (GET_MAX_OFFSET, GET_MIN_OFFSET, GET_EARLIEST_MSG_STORETIME)."""

    topic: str
    queue_id: I32
    committed: bool | None = None  # Only of request 30
    bname: str | None = None


class SearchOffsetRequestHeader(Header, gc=False):
    """The header of request 29, a search by time (ms). `boundary_type` is LOWER or UPPER (5.x)."""

    topic: str
    queue_id: I32
    timestamp: I64
    boundary_type: str | None = None
    bname: str | None = None


class OffsetResponseHeader(Header, gc=False):
    """The header of the responses to requests for an offset (14, 29, 30 and 31)."""

    offset: I64


class GetEarliestMsgStoretimeResponseHeader(Header, gc=False):
    """The header of request 32's response: the store time (ms) of the first message, -1 without one."""

    timestamp: I64


# -- queries


class QueryMessageRequestHeader(Header, gc=False):
    """The header of request 12 (QUERY_MESSAGE).

    `unique_key_query` says whether `key` is a unique key. Java's class of this header does not declare it.
    """

    topic: str
    key: str
    max_num: I32
    begin_timestamp: I64
    end_timestamp: I64
    unique_key_query: bool | None = field(name="_UNIQUE_KEY_QUERY", default=None)


class ViewMessageRequestHeader(Header, gc=False):
    """The header of request 33 (VIEW_MESSAGE_BY_ID). `offset` is a position in the broker's commit log."""

    offset: I64
    topic: str | None = None
