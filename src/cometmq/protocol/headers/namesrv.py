"""Headers of the name server's requests (docs/reference/remoting.md, Name server)."""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header


class GetRouteInfoRequestHeader(Header, gc=False):
    """The header of request 105."""

    topic: str
    accept_standard_json_only: bool | None = None


class RegisterBrokerRequestHeader(Header, gc=False):
    """The header of request 103.

    body_crc32 is the 31-bit CRC of the body as it was sent. If it is 0 or absent, the body is not checked.
    """

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
    """The header of the response to 103. Only slaves receive the two fields."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class UnregisterBrokerRequestHeader(Header, gc=False):
    """The header of requests 104 and 322."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class QueryDataVersionResponseHeader(Header, gc=False):
    """The header of the response to 322."""

    changed: bool


class PutKVConfigRequestHeader(Header, gc=False):
    """The header of request 100."""

    namespace: str
    key: str
    value: str


class GetKVConfigRequestHeader(Header, gc=False):
    """The header of requests 101 and 102."""

    namespace: str
    key: str


class GetKVConfigResponseHeader(Header, gc=False):
    """The header of the response to 101."""

    value: str | None = None


class GetKVListByNamespaceRequestHeader(Header, gc=False):
    """The header of request 219."""

    namespace: str


class BrokerNameRequestHeader(Header, gc=False):
    """The header of requests 205 and 327."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(Header, gc=False):
    """The header of the response to 205."""

    wipe_topic_count: I32


class AddWritePermOfBrokerResponseHeader(Header, gc=False):
    """The header of the response to request 327."""

    add_topic_count: I32


class GetTopicsByClusterRequestHeader(Header, gc=False):
    """The header of request 224."""

    cluster: str


class GetBrokerMemberGroupRequestHeader(Header, gc=False):
    """The header of request 901 (5.x)."""

    cluster_name: str
    broker_name: str


class BrokerHeartbeatRequestHeader(Header, gc=False):
    """The header of request 904 (5.x). heartbeat_timeout_mills is RocketMQ's own spelling."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: I64 | None = None
    epoch: I32 | None = None
    max_offset: I64 | None = None
    confirm_offset: I64 | None = None
    heartbeat_timeout_mills: I64 | None = None
    election_priority: I32 | None = None
