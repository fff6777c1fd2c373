"""Headers about clients, groups and their progress, and about filter servers (docs/reference/remoting.md,
Heartbeats, Requests to clients, Statistics and connections, Filter servers)."""

from __future__ import annotations

from msgspec import field

from cometmq.protocol.ext import I32, I64, Header


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


class PushReplyMessageRequestHeader(Header, gc=False):
    """Code 326, broker to client: a reply, with the header that it was sent with. Hosts are "ip:port"."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: I32
    queue_id: I32
    sys_flag: I32
    born_timestamp: I64
    flag: I32
    born_host: str
    store_host: str
    store_timestamp: I64
    properties: str | None = None
    reconsume_times: I32 | None = None
    unit_mode: bool | None = None


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
    """Any request whose only field is a topic (202, 217, 300, 351 ...)."""

    topic: str


class QueryConsumeTimeSpanRequestHeader(Header, gc=False):
    """Code 303."""

    topic: str
    group: str


class CloneGroupOffsetRequestHeader(Header, gc=False):
    """Code 314."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class QueryCorrectionOffsetRequestHeader(Header, gc=False):
    """Code 308. filter_groups: names divided by commas."""

    topic: str
    compare_group: str
    filter_groups: str | None = None


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


class RegisterFilterServerRequestHeader(Header, gc=False):
    """Code 301. token: ours, shows that the broker has started the filter server."""

    filter_server_addr: str
    token: str | None = None


class RegisterFilterServerResponseHeader(Header, gc=False):
    """Answer to 301."""

    broker_name: str
    broker_id: I64


class RegisterMessageFilterClassRequestHeader(Header, gc=False):
    """Code 302, to a filter server; the body is the source, class_crc its CRC-32 without the top bit."""

    consumer_group: str
    topic: str
    class_name: str
    class_crc: I32 = field(name="classCRC")
