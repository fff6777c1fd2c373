"""Headers of the name server's requests (docs/reference/remoting.md, Name server)."""

from __future__ import annotations

from cometmq.protocol.ext import I32, I64, Header


class GetRouteInfoRequestHeader(Header, gc=False):
    """The header of request 105 (GET_ROUTEINFO_BY_TOPIC)."""

    topic: str
    accept_standard_json_only: bool | None = None


class UnregisterBrokerRequestHeader(Header, gc=False):
    """The header of requests 104 (UNREGISTER_BROKER) and 322 (QUERY_DATA_VERSION)."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: I64


class RegisterBrokerRequestHeader(UnregisterBrokerRequestHeader, gc=False):
    """The header of request 103. `body_crc32` is the 31-bit CRC of the body as sent; 0 or None: no check."""

    ha_server_addr: str | None = None
    compressed: bool | None = None
    body_crc32: I32 | None = None
    heartbeat_timeout_millis: I64 | None = None
    enable_acting_master: bool | None = None
    zone_name: str | None = None


class RegisterBrokerResponseHeader(Header, gc=False):
    """The header of the response to request 103 (REGISTER_BROKER). Only slaves receive the two fields."""

    ha_server_addr: str | None = None
    master_addr: str | None = None


class QueryDataVersionResponseHeader(Header, gc=False):
    """The header of the response to request 322 (QUERY_DATA_VERSION)."""

    changed: bool


class GetKVConfigRequestHeader(Header, gc=False):
    """The header of requests 101 (GET_KV_CONFIG) and 102 (DELETE_KV_CONFIG)."""

    namespace: str
    key: str


class PutKVConfigRequestHeader(GetKVConfigRequestHeader, gc=False):
    """The header of request 100 (PUT_KV_CONFIG)."""

    value: str


class GetKVConfigResponseHeader(Header, gc=False):
    """The header of the response to request 101 (GET_KV_CONFIG)."""

    value: str | None = None


class GetKVListByNamespaceRequestHeader(Header, gc=False):
    """The header of request 219 (GET_KVLIST_BY_NAMESPACE)."""

    namespace: str


class BrokerNameRequestHeader(Header, gc=False):
    """The header of requests 205 (WIPE_WRITE_PERM_OF_BROKER) and 327 (ADD_WRITE_PERM_OF_BROKER)."""

    broker_name: str


class WipeWritePermOfBrokerResponseHeader(Header, gc=False):
    """The header of the response to request 205 (WIPE_WRITE_PERM_OF_BROKER)."""

    wipe_topic_count: I32


class AddWritePermOfBrokerResponseHeader(Header, gc=False):
    """The header of the response to request 327 (ADD_WRITE_PERM_OF_BROKER)."""

    add_topic_count: I32


class GetTopicsByClusterRequestHeader(Header, gc=False):
    """The header of request 224 (GET_TOPICS_BY_CLUSTER)."""

    cluster: str


class GetBrokerMemberGroupRequestHeader(Header, gc=False):
    """The header of request 901 (GET_BROKER_MEMBER_GROUP, 5.x)."""

    cluster_name: str
    broker_name: str


class BrokerHeartbeatRequestHeader(GetBrokerMemberGroupRequestHeader, gc=False):
    """The header of request 904 (BROKER_HEARTBEAT, 5.x), without the fields that only controllers read."""

    broker_addr: str
