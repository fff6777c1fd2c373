"""Bodies about brokers and topics: routes, cluster, registration, topic and group tables.

See docs/reference/remoting.md, Name server, Topics and groups.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from cometmq.errors import BodyError
from cometmq.protocol.codes import VERSION_5_0_0
from cometmq.protocol.compression import decompress
from cometmq.protocol.json_body import (
    BYTES_OF_A_VALUE,
    MAX_SERVER_BYTES,
    Body,
    Buffer,
    IntegerKeyed,
    always,
    ascii_json,
    empty,
    write_fastjson,
)
from cometmq.protocol.lenient import Json, loads

VERSION_FULL_REGISTRATION = 37
"""The first protocol version whose registrations have a complete body, not only the topic table."""
MAX_REGISTRATION = 16 << 20
"""The maximum size of a registration in bytes, compressed ones after their decompression."""
MAX_TOPICS = 100_000
"""The maximum number of topics in a registration: ten times that of a large cluster, parsed in 0.25 s."""

_COUNT = struct.Struct(">i")


class DataVersion(Body):
    """The version of a table and the time (ms) of its last change. Only 5.x has `state_version`."""

    timestamp: int = always(0)
    counter: int = always(0)
    state_version: int | None = None


class TopicConfig(Body):
    """A topic's settings on a broker, with bits of `Perm` and of `TopicSysFlag`."""

    topic_name: str = always("")
    read_queue_nums: int = always(16)
    write_queue_nums: int = always(16)
    perm: int = always(6)
    topic_filter_type: str = always("SINGLE_TAG")
    topic_sys_flag: int = always(0)
    order: bool = always(False)
    attributes: dict[str, str] | None = None

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        kind = value.get("topicFilterType")
        return (
            {**value, "topicFilterType": "MULTI_TAG" if kind else "SINGLE_TAG"}
            if isinstance(kind, int)
            else value
        )


class TopicConfigTable(Body):
    """All topics of a broker (response to request 21, `topics.json`, main part of a registration).

    `deleted_topics` is CometMQ's own field for slaves. It maps a deleted topic to a log position; the topic's
    messages before this position are deleted.
    """

    topic_config_table: dict[str, TopicConfig] = empty(dict)
    data_version: DataVersion | None = None
    deleted_topics: dict[str, int] | None = None


class TopicConfigList(Body):
    """Topics to create or change in one request (body of request 18, 5.x).

    The `attributes` of a topic hold only changes of attributes: "+key" with a value adds or replaces `key`.
    """

    topic_config_list: list[TopicConfig] = empty(list)


RETRY_MAX_TIMES = 16  # Default maximum number of retries of a consumer group


class SubscriptionGroupConfig(Body):
    """A consumer group's settings on a broker."""

    group_name: str
    consume_enable: bool = always(True)
    consume_from_min_enable: bool = always(True)
    consume_broadcast_enable: bool = always(True)
    retry_queue_nums: int = always(1)
    retry_max_times: int = always(RETRY_MAX_TIMES)
    broker_id: int = always(0)
    which_broker_when_consume_slowly: int = always(1)
    notify_consumer_ids_changed_enable: bool = always(True)
    consume_message_orderly: bool | None = None
    consume_timeout_minute: int | None = None
    group_sys_flag: int | None = None
    group_retry_policy: dict[str, Any] | None = None
    attributes: dict[str, str] | None = None


class SubscriptionGroupTable(Body):
    """All consumer groups of a broker (response to request 201, `subscriptionGroup.json`)."""

    subscription_group_table: dict[str, SubscriptionGroupConfig] = empty(dict)
    data_version: DataVersion | None = None


class SubscriptionGroupList(Body):
    """Consumer groups to create or change in one request (body of request 225, 5.x)."""

    group_config_list: list[SubscriptionGroupConfig] = empty(list)


# -- routes


class QueueData(Body):
    """The queues of a topic on one broker."""

    broker_name: str
    read_queue_nums: int = always(0)
    write_queue_nums: int = always(0)
    perm: int = always(6)
    topic_sys_flag: int = always(0)

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        # Name servers of 3.x and some clients misspell topicSysFlag as topicSynFlag.
        return {**value, "topicSysFlag": value["topicSynFlag"]} if "topicSynFlag" in value else value


class BrokerData(IntegerKeyed):
    """The processes that share a broker name: the address "ip:port" by broker id. Id 0 is the master."""

    cluster: str = always("")
    broker_name: str = always("")
    broker_addrs: dict[int, str] = empty(dict)
    enable_acting_master: bool | None = None
    zone_name: str | None = None


class TopicRouteData(IntegerKeyed):
    """The route of a topic (response to request 105).

    For an ordered topic, `order_topic_conf` lists how many queues each broker has: "broker-a:8;broker-b:8".
    """

    queue_datas: list[QueueData] = empty(list)
    broker_datas: list[BrokerData] = empty(list)
    filter_server_table: dict[str, list[str]] = empty(dict)
    order_topic_conf: str | None = None
    topic_queue_mapping_by_broker: dict[str, Any] | None = None

    def encode(self, standard: bool = True) -> bytes:
        """Return the route in standard JSON of ASCII, or with bare integers as keys, for old clients."""
        text = write_fastjson(self, not standard)
        return ascii_json(text) if standard else text

    @classmethod
    def prepare(cls, value: dict[Any, Json]) -> dict[Any, Json]:
        queues = value.get("queueDatas")
        if not isinstance(queues, list):
            return value
        return {**value, "queueDatas": [QueueData.prepare(q) if isinstance(q, dict) else q for q in queues]}


class ClusterInfo(IntegerKeyed):
    """The addresses of each broker, and the broker names of each cluster (response to request 106)."""

    broker_addr_table: dict[str, BrokerData] = empty(dict)
    cluster_addr_table: dict[str, list[str]] = empty(dict)


class BrokerMemberGroup(IntegerKeyed):
    """The master and the slaves that share one broker name (response to request 901, 5.x)."""

    broker_member_group: BrokerData | None = None


class TopicList(Body):
    """Names of topics (response to requests 206, 224, 304, 305, 311 to 313). Only 304's has an address."""

    topic_list: list[str] = empty(list)
    broker_addr: str | None = None


class KVTable(Body):
    """Texts by key, in responses to requests 28, 219 and 103 (there, the ordered topics)."""

    table: dict[str, str] = empty(dict)


# -- registration


class RegisterBrokerBody(Body):
    """The content of a broker's registration (body of request 103)."""

    topic_config_serialize_wrapper: TopicConfigTable = msgspec.field(default_factory=TopicConfigTable)
    filter_server_list: list[str] | None = None

    @classmethod
    def of(
        cls,
        topics: Mapping[str, TopicConfig],
        data_version: DataVersion,
        filter_servers: list[str] | None = None,
    ) -> Self:
        return cls(TopicConfigTable(dict(topics), data_version), filter_servers or [])

    @property
    def topics(self) -> dict[str, TopicConfig]:
        return self.topic_config_serialize_wrapper.topic_config_table

    @property
    def data_version(self) -> DataVersion:
        """The version of the topic table, or a zero version if the broker sent none."""
        return self.topic_config_serialize_wrapper.data_version or DataVersion()

    def encode(self, compressed: bool = False) -> bytes:
        """Return the body, in 4.9's compressed format if asked for, which cannot hold 5.x's attributes."""
        if not compressed:
            return super().encode()
        parts = [_counted(write_fastjson(self.data_version)), _COUNT.pack(len(self.topics))]
        for topic in self.topics.values():
            words = (
                topic.topic_name,
                topic.read_queue_nums,
                topic.write_queue_nums,
                topic.perm,
                topic.topic_filter_type,
            )
            parts.append(_counted(" ".join(map(str, words)).encode()))
        parts.append(_counted(write_fastjson(self.filter_server_list or [])))
        return zlib.compress(b"".join(parts), 9)

    @classmethod
    def decode(cls, data: Buffer, compressed: bool = False, version: int = VERSION_5_0_0) -> Self:
        """Decode a registration of a broker with this protocol version. Raises BodyError."""
        if compressed:
            return cls._decode_compressed(decompress(1, bytes(data), MAX_REGISTRATION))
        if version < VERSION_FULL_REGISTRATION:
            said = cls(TopicConfigTable.decode(data))
        else:
            said = super().decode(data)
        _check_number(len(said.topics))
        return said

    @classmethod
    def _decode_compressed(cls, data: bytes) -> Self:
        reader = _Counted(data)
        version = DataVersion.decode(reader.read("data version"))
        count = reader.count("number of topics")
        _check_number(count)
        topics: dict[str, TopicConfig] = {}
        for _ in range(count):
            topic = _topic_of(reader)
            topics[topic.topic_name] = topic
        filters: list[str] | None = None
        if reader.left:
            try:
                found = reader.json(reader.read("filter servers"), "filter servers")
                filters = msgspec.convert(found or [], list[str], strict=False)
            except (msgspec.ValidationError, BodyError):
                filters = None  # An invalid list of filter servers is ignored, as in Java
        return cls(TopicConfigTable(topics, version), filters)


def _check_number(topics: int) -> None:
    if not 0 <= topics <= MAX_TOPICS:
        raise BodyError("registration", f"{topics}, at most {MAX_TOPICS} are allowed", "number of topics")


def _topic_of(reader: _Counted) -> TopicConfig:
    """Read a topic written as `name read write perm filterType`, followed by 5.x's attributes."""
    text = reader.read("topic").decode("utf-8", "replace")
    words = text.split(" ", 5)
    if len(words) < 5:
        raise BodyError(
            "compressed registration", f"topic {text[:100]!r} has {len(words)} words, not 5", "topic"
        )
    try:
        read, write, perm = (int(word) for word in words[1:4])
    except ValueError:
        raise BodyError(
            "compressed registration", f"topic {text[:100]!r} has a word that is no number", "topic"
        ) from None
    topic = TopicConfig(words[0], read, write, perm, words[4])
    attributes = None
    if len(words) == 6 and words[5].strip():
        attributes = reader.json(words[5].encode(), "topic attributes")
    if isinstance(attributes, dict):
        topic.attributes = {str(key): str(value) for key, value in attributes.items()}
    return topic


def _counted(text: bytes) -> bytes:
    return _COUNT.pack(len(text)) + text


class _Counted:
    """A reader of binary data that consists of parts, each preceded by its length."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._pos = 0
        self._lenient_left = MAX_SERVER_BYTES

    @property
    def left(self) -> int:
        return len(self._data) - self._pos

    def count(self, what: str) -> int:
        if self.left < 4:
            raise BodyError("compressed registration", "the data ends before this part", what)
        number: int = _COUNT.unpack_from(self._data, self._pos)[0]
        self._pos += 4
        return number

    def read(self, what: str) -> bytes:
        length = self.count(what)
        if not 0 <= length <= self.left:
            raise BodyError("compressed registration", f"length {length}, but {self.left} bytes left", what)
        start = self._pos
        self._pos += length
        return self._data[start : self._pos]

    def json(self, text: bytes, what: str) -> Json:
        """Decode a part from standard JSON or fastjson's dialect. Raises BodyError.

        Reading the dialect is slow, so all parts in it may together have `MAX_SERVER_BYTES`.
        """
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            values = 1 + text.count(b",") + text.count(b"{") + text.count(b"[")
            self._lenient_left -= max(len(text), BYTES_OF_A_VALUE * values)
        if self._lenient_left < 0:
            problem = f"{MAX_SERVER_BYTES} bytes are not standard JSON"
            raise BodyError("compressed registration", problem, what)
        return loads(text, what)
