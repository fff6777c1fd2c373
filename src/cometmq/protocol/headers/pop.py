"""Headers of POP consumption: messages leased to a consumer, their acknowledgement, and long polls.

See docs/reference/remoting.md, POP family. Times are in ms; times of day are epoch ms. `topic` in a request
about a leased message is the topic in which the broker found it: the topic itself or a retry topic.
"""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header
from cometmq.protocol.headers.message import GroupQueueRequestHeader


class PopMessageRequestHeader(GroupQueueRequestHeader, gc=False, kw_only=True):
    """The header of request 200050 (POP_MESSAGE).

    The queue id -1 means all queues of the broker. `poll_time` is how long the broker may hold the request,
    counted from `born_time`. Without a `born_time`, brokers count from the arrival of the request, so that
    the client's clock does not matter. `init_mode` says where a new group starts: 0 at the first
    message, 1 at the end. Repeating `attempt_id` in an ordered request returns the same messages again.
    """

    max_msg_nums: I32
    invisible_time: I64
    poll_time: I64 | None = None
    born_time: I64 | None = None
    init_mode: I32 | None = None
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


class ChangeInvisibleTimeResponseHeader(Header, gc=False):
    """The header of the response to request 200053: the parts of the receipt handle that have changed."""

    pop_time: I64
    invisible_time: I64
    revive_qid: I32


class PopMessageResponseHeader(ChangeInvisibleTimeResponseHeader, gc=False):
    """The header of the response to request 200050, with three fields for `cometmq.protocol.pop`."""

    rest_num: I64 | None = None
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class PopLiteMessageRequestHeader(Header, gc=False):
    """The header of request 200070, a pop from a client's lite topics. The response has no offsets."""

    client_id: str
    consumer_group: str
    topic: str  # The parent topic
    max_msg_num: I32
    invisible_time: I64
    poll_time: I64
    born_time: I64
    attempt_id: str | None = None


class NotifyUnsubscribeLiteRequestHeader(Header, gc=False):
    """The header of request 200073: a client of an exclusive group has lost a lite topic to another one."""

    lite_topic: str
    consumer_group: str
    client_id: str


class AckMessageRequestHeader(GroupQueueRequestHeader, gc=False, kw_only=True):
    """The header of request 200051 (ACK_MESSAGE). `extra_info` is the message's receipt handle."""

    extra_info: str
    offset: I64
    lite_topic: str | None = None


class ChangeInvisibleTimeRequestHeader(AckMessageRequestHeader, gc=False, kw_only=True):
    """The header of request 200053. `suspend` gives the message back without counting a delivery."""

    invisible_time: I64
    suspend: bool | None = None


class PeekMessageRequestHeader(GroupQueueRequestHeader, gc=False, kw_only=True):
    """The header of request 200052 (PEEK_MESSAGE), which reads messages without a lease."""

    max_msg_nums: I32


class NotificationRequestHeader(GroupQueueRequestHeader, gc=False, kw_only=True):
    """The header of request 200054 (NOTIFICATION), which waits until a group has a message to receive."""

    poll_time: I64
    born_time: I64 | None = None
    order: bool | None = None
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None


class NotificationResponseHeader(Header, gc=False):
    """The header of the response to request 200054. `polling_full`: the broker holds no more requests."""

    has_msg: bool
    polling_full: bool | None = None


class WithdrawPopRequestHeader(Header, gc=False):
    """The header of request 21008 (CometMQ's own): a parked pop (its opaque number) is to be answered."""

    request: I32


class PollingInfoResponseHeader(Header, gc=False):
    """The header of the response to request 200055: how many requests the broker holds for the queue."""

    polling_num: I32
