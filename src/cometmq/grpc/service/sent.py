"""From a message of a 5.x producer to the send request of remoting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from cometmq.errors import CometError
from cometmq.grpc.rpc.enums import Code, Encoding, MessageType
from cometmq.grpc.rpc.messages import messages
from cometmq.grpc.rpc.status import ServiceError
from cometmq.message import check_topic_name
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import TBW102, SysFlag
from cometmq.protocol.headers import SendMessageRequestHeaderV2
from cometmq.protocol.lite import is_lite_topic
from cometmq.protocol.properties import values as names
from cometmq.protocol.properties.values import encode_properties, is_reserved, java_hash

NEW_QUEUES = 4
"""The number of queues of a topic that a send creates."""
MAX_PROPERTIES = 128
MAX_KEYS = 1024
MAX_PROPERTIES_BYTES = 16 * 1024
MAX_GROUP_BYTES = 64
MAX_IMMUNITY_S = 3600
MAX_CACHED_BYTES = 512
"""The maximum size of encoded system properties whose meaning is cached."""
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999, which a protobuf timestamp can hold."""
TRACE_CONTEXT = "TRACE_CONTEXT"
OWN_PROPERTIES = frozenset({names.SHARDING_KEY, names.PRIORITY, names.LITE_TOPIC})
"""Names that clients set by fields of a message, beside RocketMQ's reserved names."""
MIXED = frozenset({MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class SendRequest(NamedTuple):
    """A message as the parts of a send request."""

    header: SendMessageRequestHeaderV2
    body: bytes
    message_id: str
    type: MessageType


@lru_cache(maxsize=16)
def accepted_types(attribute: str) -> Sequence[MessageType]:
    """Return the types of messages that a topic accepts, by its attribute `message.type`.

    A topic without the attribute accepts all types but LITE. (Apache's proxy accepts only NORMAL there. Its
    users must give each topic a type before they can send other messages.)
    """
    if attribute == "MIXED":
        return sorted(MIXED)
    if attribute in ("", "UNSPECIFIED"):
        return sorted(MIXED | {MessageType.PRIORITY})
    return [MessageType[attribute]] if attribute in MessageType.__members__ else []


class Shape(NamedTuple):
    """What the system properties of a message mean, apart from its id and its times.

    Attributes:
        text: The part of the property string that follows the message's id.
        sharded: The message group or the lite topic, which has one queue, or "".
    """

    type: MessageType
    text: str
    sys_flag: int
    sharded: str


def type_of(system: Any) -> MessageType:
    """Return the type that the system properties imply: some clients send NORMAL with any message."""
    if system.message_type == MessageType.TRANSACTION:
        return MessageType.TRANSACTION
    if system.HasField("delivery_timestamp"):
        return MessageType.DELAY
    if system.message_group:
        return MessageType.FIFO
    if system.HasField("priority"):
        return MessageType.PRIORITY
    return MessageType.LITE if system.lite_topic else MessageType.NORMAL


def send_request(message: Any, max_body: int, config: TopicConfig | None) -> SendRequest:
    """Return the send request for a `Message`, to an unknown topic if `config` is None.

    Raises ServiceError if a field of the message is invalid.
    """
    system, topic, body = message.system_properties, message.topic.name, message.body
    if config is None:
        try:
            check_topic_name(topic)
        except CometError as error:
            raise ServiceError(Code.ILLEGAL_TOPIC, f"topic: {error}") from None
    if not system.message_id:
        raise ServiceError(Code.ILLEGAL_MESSAGE_ID, "message_id: the message has none")
    if not body:
        raise ServiceError(Code.MESSAGE_BODY_EMPTY, "body: the message has none")
    if len(body) > max_body:
        problem = f"body: {len(body)} bytes, at most {max_body}"
        raise ServiceError(Code.MESSAGE_BODY_TOO_LARGE, problem)
    born_ms, message_id = (
        _epoch_ms("born_timestamp", system.born_timestamp, Code.BAD_REQUEST),
        system.message_id,
    )
    if "\x01" in message_id or "\x02" in message_id:
        problem = f"message_id: {message_id[:80]!r} contains a separator (0x01 or 0x02)"
        raise ServiceError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, problem)
    user = _user_properties(message)
    shape = _shape_of(system, topic)
    write_queues = config.write_queue_nums if config is not None else 0
    before = encode_properties(user, last_separator=True).decode() if user else ""
    header = SendMessageRequestHeaderV2(
        topic=topic,
        queue_id=queue_of(shape.sharded, write_queues) if shape.sharded and write_queues else -1,
        sys_flag=shape.sys_flag,
        born_timestamp=born_ms,
        flag=0,
        producer_group=topic,
        default_topic=TBW102,
        default_topic_queue_nums=NEW_QUEUES,
        properties=f"{before}{names.UNIQ_KEY}\x01{message_id}\x02{shape.text}",
        reconsume_times=0,
        unit_mode=False,
        batch=False,
    )
    return SendRequest(header, body, message_id, shape.type)


def _shape_of(system: Any, topic: str) -> Shape:
    """Return the shape of a message's system properties, from which its id and its time are removed.

    Messages of a producer often differ only in these. To look the others up takes 2 µs instead of 6.
    """
    varies = bool(system.keys or system.trace_context or system.HasField("delivery_timestamp"))
    system.ClearField("message_id")
    system.ClearField("born_timestamp")
    encoded = system.SerializeToString()
    find = _make_shape if varies or len(encoded) > MAX_CACHED_BYTES else _cached_shape
    return find(encoded, topic)


def _make_shape(encoded: bytes, topic: str) -> Shape:
    system = messages().SystemProperties.FromString(encoded)
    kind = type_of(system)
    text = encode_properties(_system_properties(system, topic, kind), last_separator=True).decode()
    sys_flag = SysFlag.COMPRESSED if system.body_encoding == Encoding.GZIP else 0
    if kind is MessageType.TRANSACTION:
        sys_flag |= SysFlag.TRANSACTION_PREPARED
    return Shape(kind, text, int(sys_flag), system.message_group or system.lite_topic)


_cached_shape = lru_cache(maxsize=1024)(_make_shape)


def _user_properties(message: Any) -> dict[str, str]:
    count = len(message.user_properties)
    if not count:
        return {}
    check_count("user_properties", count, MAX_PROPERTIES)
    given = dict(message.user_properties)
    size = 0
    for name, value in given.items():
        size += len(name.encode()) + len(value.encode())
        if not name or is_reserved(name) or name in OWN_PROPERTIES:
            problem = f"user_properties: the name {name!r} is empty or reserved"
            raise ServiceError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, problem)
        if _CONTROL.search(name) or _CONTROL.search(value):
            problem = f"user_properties: {name!r} contains control characters"
            raise ServiceError(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, problem)
    if size > MAX_PROPERTIES_BYTES:
        problem = f"user_properties: {size} bytes, at most {MAX_PROPERTIES_BYTES}"
        raise ServiceError(Code.MESSAGE_PROPERTIES_TOO_LARGE, problem)
    return given


def check_count(field: str, count: int, most: int) -> None:
    """Raise ServiceError if a message has too many keys or properties."""
    if count > most:
        raise ServiceError(Code.MESSAGE_PROPERTIES_TOO_LARGE, f"{field}: {count}, at most {most}")


def _system_properties(system: Any, topic: str, kind: MessageType) -> dict[str, str]:
    properties = {names.WAIT: "true"}
    if system.tag:
        properties[names.TAGS] = _checked("tag", system.tag, Code.ILLEGAL_MESSAGE_TAG, forbidden="|")
    check_count("keys", len(system.keys), MAX_KEYS)
    if keys := [_checked("keys", key, Code.ILLEGAL_MESSAGE_KEY) for key in system.keys if key]:
        properties[names.KEYS] = " ".join(keys)  # A blank inside a key divides it, as at Apache's proxy
    if system.message_group:
        group = _checked("message_group", system.message_group, Code.ILLEGAL_MESSAGE_GROUP)
        if len(group.encode()) >= MAX_GROUP_BYTES:
            problem = f"message_group: {len(group.encode())} bytes, less than {MAX_GROUP_BYTES} are allowed"
            raise ServiceError(Code.ILLEGAL_MESSAGE_GROUP, problem)
        properties[names.SHARDING_KEY] = group
    if system.HasField("delivery_timestamp"):
        given = _epoch_ms("delivery_timestamp", system.delivery_timestamp, Code.ILLEGAL_DELIVERY_TIME)
        properties[names.TIMER_DELIVER_MS] = str(given)
    if system.HasField("priority"):
        if system.priority < 0:
            raise ServiceError(Code.BAD_REQUEST, f"priority: {system.priority} is negative")
        properties[names.PRIORITY] = str(system.priority)
    if system.lite_topic:
        if not is_lite_topic(system.lite_topic):
            problem = f"lite_topic: {system.lite_topic[:80]!r} is not a valid name"
            raise ServiceError(Code.ILLEGAL_LITE_TOPIC, problem)
        properties[names.LITE_TOPIC] = system.lite_topic
    if system.trace_context:
        properties[TRACE_CONTEXT] = _checked("trace_context", system.trace_context, Code.BAD_REQUEST)
    if kind is MessageType.TRANSACTION:
        properties |= {names.TRAN_MSG: "true", names.PGROUP: topic}
        if system.HasField("orphaned_transaction_recovery_duration"):
            seconds = system.orphaned_transaction_recovery_duration.ToSeconds()
            if not 0 <= seconds <= MAX_IMMUNITY_S:
                problem = f"orphaned_transaction_recovery_duration: {seconds} s, at most {MAX_IMMUNITY_S}"
                raise ServiceError(Code.BAD_REQUEST, problem)
            properties[names.CHECK_IMMUNITY_TIME_IN_SECONDS] = str(seconds)
    return properties


def _epoch_ms(field: str, timestamp: Any, code: Code) -> int:
    """Return the epoch ms of a protobuf timestamp. Raises ServiceError if it is invalid."""
    seconds, nanos = timestamp.seconds, timestamp.nanos
    if not (FIRST_SECOND <= seconds <= LAST_SECOND and 0 <= nanos < 10**9):
        raise ServiceError(code, f"{field}: {seconds} s and {nanos} ns are no valid time")
    return int(seconds * 1000 + nanos // 1_000_000)


def _checked(field: str, text: str, code: Code, forbidden: str = "") -> str:
    """Return a text. Raises ServiceError if it is blank or has control or forbidden characters."""
    if not text.strip() or _CONTROL.search(text) or any(each in text for each in forbidden):
        raise ServiceError(
            code, f"{field}: {text[:80]!r} is blank or contains characters that are not allowed"
        )
    return text


def queue_of(group: str, queues: int) -> int:
    """Return the queue of a message group: the same as at Apache's proxy, for the same number of queues.

    It is the bucket of the jump consistent hash (Lamping and Veach, 2014), with Guava's generator, of Java's
    hash of the text.
    """
    state = java_hash(group)
    bucket, following = 0, 0
    while following < queues:
        bucket = following
        state = (2862933555777941757 * state + 1) & 0xFFFF_FFFF_FFFF_FFFF
        share = ((state >> 33) + 1) / (1 << 31)
        following = int((bucket + 1) / share)
    return bucket
