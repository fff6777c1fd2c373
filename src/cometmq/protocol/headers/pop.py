"""Headers of POP consumption: messages leased to a consumer, their acknowledgement, and long polls.

See docs/reference/remoting.md, POP family. Times are in ms; times of day are epoch ms. `topic` in a request
about a leased message is the topic in which the broker found it: the topic itself or a retry topic.
"""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header


class PopMessageRequestHeader(Header, gc=False):
    """The header of request 200050 (POP_MESSAGE).

    The queue id -1 means all queues of the broker. `poll_time` is how long the broker may hold the request,
    counted from `born_time`. Without a `born_time`, brokers count from the arrival of the request, so that
    the client's clock does not matter. `init_mode` says where a new group starts: 0 at the first
    message, 1 at the end. Repeating `attempt_id` in an ordered request returns the same messages again.
    """

    consumer_group: str
    topic: str
    queue_id: I32
    max_msg_nums: I32
    invisible_time: I64
    poll_time: I64 | None = None
    born_time: I64 | None = None
    init_mode: I32 | None = None
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None
    bname: str | None = None


class PopMessageResponseHeader(Header, gc=False):
    """The header of the response to request 200050.

    `cometmq.protocol.pop` reads and writes the last three fields.
    """

    pop_time: I64
    invisible_time: I64
    revive_qid: I32
    rest_num: I64 | None = None
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class PopLiteMessageRequestHeader(Header, gc=False):
    """The header of request 200070 (POP_LITE_MESSAGE), which receives from the lite topics of a client.

    `topic` is the parent topic. The response has a `PopMessageResponseHeader` without offsets.
    """

    client_id: str
    consumer_group: str
    topic: str
    max_msg_num: I32
    invisible_time: I64
    poll_time: I64
    born_time: I64
    attempt_id: str | None = None


class NotifyUnsubscribeLiteRequestHeader(Header, gc=False):
    """The header of request 200073 (NOTIFY_UNSUBSCRIBE_LITE).

    The broker sends it to a client that has lost a subscription, because another client of its exclusive
    group has subscribed to the lite topic.
    """

    lite_topic: str
    consumer_group: str
    client_id: str


class AckMessageRequestHeader(Header, gc=False):
    """The header of request 200051 (ACK_MESSAGE). `extra_info` is the message's receipt handle."""

    consumer_group: str
    topic: str
    queue_id: I32
    extra_info: str
    offset: I64
    lite_topic: str | None = None
    bname: str | None = None


class ChangeInvisibleTimeRequestHeader(Header, gc=False):
    """The header of request 200053 (CHANGE_MESSAGE_INVISIBLETIME).

    `extra_info` is the message's receipt handle. `suspend` gives the message back without counting a
    delivery.
    """

    consumer_group: str
    topic: str
    queue_id: I32
    extra_info: str
    offset: I64
    invisible_time: I64
    suspend: bool | None = None
    lite_topic: str | None = None
    bname: str | None = None


class ChangeInvisibleTimeResponseHeader(Header, gc=False):
    """The header of the response to request 200053: the parts of the receipt handle that have changed."""

    pop_time: I64
    invisible_time: I64
    revive_qid: I32


class PeekMessageRequestHeader(Header, gc=False):
    """The header of request 200052 (PEEK_MESSAGE), which reads messages without a lease."""

    topic: str
    queue_id: I32
    max_msg_nums: I32
    consumer_group: str
    bname: str | None = None


class NotificationRequestHeader(Header, gc=False):
    """The header of request 200054 (NOTIFICATION), which waits until a group has a message to receive."""

    consumer_group: str
    topic: str
    queue_id: I32
    poll_time: I64
    born_time: I64 | None = None
    order: bool | None = None
    attempt_id: str | None = None
    exp_type: str | None = None
    exp: str | None = None
    bname: str | None = None


class NotificationResponseHeader(Header, gc=False):
    """The header of the response to request 200054.

    `polling_full` means that the broker refuses to hold more requests.
    """

    has_msg: bool
    polling_full: bool | None = None


class PollingInfoRequestHeader(Header, gc=False):
    """The header of request 200055 (POLLING_INFO)."""

    consumer_group: str
    topic: str
    queue_id: I32
    bname: str | None = None


class WithdrawPopRequestHeader(Header, gc=False):
    """The header of request 21008 (CometMQ's own): a parked pop of the same connection is to be answered.

    `request` is the number (opaque) of the pop's request.
    """

    request: I32


class PollingInfoResponseHeader(Header, gc=False):
    """The header of the response to request 200055: how many requests the broker holds for the queue."""

    polling_num: I32
