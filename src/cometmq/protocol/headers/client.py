"""Headers about clients, groups and their progress, and about filter servers.

See docs/reference/remoting.md, Heartbeats, Requests to clients, Statistics and connections, Filter servers.
"""

from __future__ import annotations

from msgspec import field

from cometmq.protocol.ext import I32, I64, Header


class UnregisterClientRequestHeader(Header, gc=False):
    """The header of request 35 (UNREGISTER_CLIENT)."""

    client_id: str = field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class ConsumerGroupRequestHeader(Header, gc=False):
    """The header of requests 38 (a group's members), 40 (to clients: members have changed) and 203."""

    consumer_group: str
    bname: str | None = None


class GetProducerConnectionListRequestHeader(Header, gc=False):
    """The header of request 204 (GET_PRODUCER_CONNECTION_LIST)."""

    producer_group: str


class GetConsumeStatsRequestHeader(Header, gc=False):
    """The header of request 208 (GET_CONSUME_STATS). An empty or absent topic means all topics."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetConsumerRunningInfoRequestHeader(Header, gc=False):
    """The header of request 307 (GET_CONSUMER_RUNNING_INFO)."""

    consumer_group: str
    client_id: str
    jstack_enable: bool | None = None


class ConsumeMessageDirectlyRequestHeader(Header, gc=False):
    """The header of request 309 (CONSUME_MESSAGE_DIRECTLY). `msg_id` is an offset id."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: I32 | None = None
    group_sys_flag: I32 | None = None


class PushReplyMessageRequestHeader(Header, gc=False):
    """The header of request 326, by which a broker passes a reply message to a client. Hosts: "ip:port"."""

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
    """The header of requests 220 and 222, a reset of offsets to a time, or to the end for -1."""

    topic: str
    group: str
    timestamp: I64
    is_force: bool | None = None
    queue_id: I32 | None = None
    offset: I64 | None = None


class GroupTopicRequestHeader(Header, gc=False):
    """The header of requests 221 and 223 (the offsets of consumers), and of 303 (QUERY_CONSUME_TIME_SPAN)."""

    topic: str
    group: str
    client_addr: str | None = None


class TopicRequestHeader(Header, gc=False):
    """The header of requests whose only field is a topic (202, 217, 300, 351 and others)."""

    topic: str


class CloneGroupOffsetRequestHeader(Header, gc=False):
    """The header of request 314 (CLONE_GROUP_OFFSET)."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class QueryCorrectionOffsetRequestHeader(Header, gc=False):
    """The header of request 308. `filter_groups` holds group names separated by commas."""

    topic: str
    compare_group: str
    filter_groups: str | None = None


class GetBrokerConsumeStatsRequestHeader(Header, gc=False):
    """The header of request 317 (GET_BROKER_CONSUME_STATS)."""

    is_order: bool | None = None


class QueryConsumeQueueRequestHeader(Header, gc=False):
    """The header of request 321 (QUERY_CONSUME_QUEUE)."""

    topic: str
    queue_id: I32
    index: I64
    count: I32
    consumer_group: str | None = None


class RegisterFilterServerRequestHeader(Header, gc=False):
    """The header of request 301. `token` (CometMQ's own) proves that the broker started the filter server."""

    filter_server_addr: str
    token: str | None = None


class RegisterFilterServerResponseHeader(Header, gc=False):
    """The header of the response to request 301 (REGISTER_FILTER_SERVER)."""

    broker_name: str
    broker_id: I64


class RegisterMessageFilterClassRequestHeader(Header, gc=False):
    """The header of request 302 to a filter server. The body is source code, `class_crc` its 31-bit CRC."""

    consumer_group: str
    topic: str
    class_name: str
    class_crc: I32 = field(name="classCRC")
