"""The property string of a message in bytes, RocketMQ's property names, and Java's string hash.

A property string is `name 0x01 value 0x02 name 0x01 value` in UTF-8. After the last pair, 5.x writes a
separator and 4.9 does not; both forms are read. As in Java, entries of fewer than 3 characters and entries
with an empty name or value are ignored. If a name occurs several times, its last value counts
(docs/reference/remoting.md, Property string).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

from cometmq.errors import MessageIllegal

NAME_END = b"\x01"
VALUE_END = b"\x02"
UNIQUE_KEY = b"UNIQ_KEY" + NAME_END
"""The bytes that precede the unique key's value in a property string."""

KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
UNIQ_KEY = "UNIQ_KEY"
CLUSTER = "CLUSTER"
RETRY_TOPIC = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
RECONSUME_TIME = "RECONSUME_TIME"
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
REAL_TOPIC = "REAL_TOPIC"
REAL_QID = "REAL_QID"
TRAN_MSG = "TRAN_MSG"
PGROUP = "PGROUP"
TRAN_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_TIME_IN_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS"
MIN_OFFSET = "MIN_OFFSET"
MAX_OFFSET = "MAX_OFFSET"
CONSUME_START_TIME = "CONSUME_START_TIME"
MSG_REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
INSTANCE_ID = "INSTANCE_ID"
MSG_TYPE = "MSG_TYPE"
CORRELATION_ID = "CORRELATION_ID"
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
TTL = "TTL"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
ARRIVE_TIME = "ARRIVE_TIME"
BUYER_ID = "BUYER_ID"
INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"
INNER_NUM = "INNER_NUM"
INNER_BASE = "INNER_BASE"
POP_CK = "POP_CK"
FIRST_POP_TIME = "1ST_POP_TIME"
TIMER_DELAY_SEC = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"
BORN_TIMESTAMP = "BORN_TIMESTAMP"
DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID = "DLQ_ORIGIN_MESSAGE_ID"
CRC32 = "__CRC32#"
PRIORITY = "_SYS_MSG_PRIORITY_"
LITE_TOPIC = "__LITE_TOPIC"
SHARDING_KEY = "__SHARDINGKEY"

RESERVED = frozenset(
    {
        KEYS, TAGS, WAIT, DELAY, UNIQ_KEY, CLUSTER, RETRY_TOPIC, ORIGIN_MESSAGE_ID, RECONSUME_TIME,
        MAX_RECONSUME_TIMES, REAL_TOPIC, REAL_QID, TRAN_MSG, PGROUP, TRAN_PREPARED_QUEUE_OFFSET,
        TRANSACTION_CHECK_TIMES, CHECK_IMMUNITY_TIME_IN_SECONDS, "__transactionId__", MIN_OFFSET, MAX_OFFSET,
        CONSUME_START_TIME, MSG_REGION, TRACE_ON, INSTANCE_ID, MSG_TYPE, CORRELATION_ID, REPLY_TO_CLIENT,
        TTL, PUSH_REPLY_TIME, ARRIVE_TIME, BUYER_ID, "TRANSFER_FLAG", "CORRECTION_FLAG", "MQ2_FLAG",
        INNER_MULTI_DISPATCH, INNER_MULTI_QUEUE_OFFSET, INNER_NUM, INNER_BASE, POP_CK, "POP_CK_OFFSET",
        FIRST_POP_TIME, TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS, "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", TIMER_OUT_MS, "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL",
        "__BORNHOST", BORN_TIMESTAMP, "TRACE_CONTEXT", "PROPERTY_FORWARD_QUEUE_ID", "REDIRECT",
        DLQ_ORIGIN_TOPIC, DLQ_ORIGIN_MESSAGE_ID, "EXTEND_UNIQ_INFO", "DUP_INFO", CRC32,
    }
)  # fmt: skip
"""The names of the properties that RocketMQ itself uses (docs/reference/remoting.md, Property string).

SHARDING_KEY, PRIORITY and LITE_TOPIC are not among them, because users set them.
"""
TRANSIENT_PREFIX = "__RMQ.TRANSIENT."

MAX_PROPERTIES_BYTES = 32_767
"""The maximum length of a property string in bytes, because its length field is a signed 16-bit number."""


def is_reserved(name: str) -> bool:
    """Return whether RocketMQ itself uses this property, so that users may not set it."""
    return name in RESERVED or name.startswith(TRANSIENT_PREFIX)


# -- the whole string


def encode_properties(properties: Mapping[str, str], last_separator: bool = False) -> bytes:
    """Return the property string, with a 0x02 at its end if `last_separator` is set, as in 5.x.

    Raises MessageIllegal if a name or value contains a separator, so that it could not be parsed again.
    """
    text = "\x02".join([f"{name}\x01{value}" for name, value in properties.items()])
    # Without separators in names and values, n pairs have n separators 0x01 and n - 1 separators 0x02. To
    # count these in the whole string is faster than to check each name and value.
    pairs = len(properties)
    if text.count("\x01") != pairs or text.count("\x02") != max(pairs - 1, 0):
        for name, value in properties.items():
            for part in (name, value):
                if "\x01" in part or "\x02" in part:
                    raise MessageIllegal(f"property {name!r} contains a separator (0x01 or 0x02)", field=name)
    encoded = text.encode("utf-8", "replace")
    return encoded + VALUE_END if last_separator and encoded else encoded


def decode_properties(properties: bytes) -> dict[str, str]:
    """Return the properties of a string, in the string's order. Bytes that are not UTF-8 are replaced."""
    found: dict[str, str] = {}
    for piece in properties.decode("utf-8", "replace").split("\x02"):
        name, _, value = piece.partition("\x01")
        # The first 0x01 of an entry ends its name, as in Java's readers since 4.9.1. Earlier readers ignored
        # an entry with a second 0x01.
        if value and name:
            found[name] = value
    return found


_OTHERS = bytes(set(range(256)) - {1, 2})
_ALTERNATING = b"\x01\x02" * 16_384


def has_stray_separator(text: bytes) -> bool:
    """Return whether a name or a value in a property string contains a separator.

    This is the case if a value contains 0x01, or a name or a value contains 0x02. Such a string cannot be
    built again from its parsed properties. `text` may also be several property strings, joined by 0x02. The
    check takes 0.2 µs.
    """
    found = text.translate(None, _OTHERS)
    if len(found) & 1 and _ALTERNATING.startswith(found):
        return False
    return any(pair.count(NAME_END) != 1 for pair in text.split(VALUE_END) if pair)


# -- single values, without decoding the other properties


def value_of(properties: bytes | bytearray, name: bytes, start: int = 0, stop: int | None = None) -> bytes:
    """Return the value of a property in properties[start:stop], or an empty value if it is absent.

    If the property has several non-empty values, the last one counts, as in a map.
    """
    marker = name + NAME_END
    if stop is None:
        stop = len(properties)
    behind = stop
    while (at := properties.rfind(marker, start, behind)) >= 0:
        if at == start or properties[at - 1] == 2:
            end = properties.find(VALUE_END, at, stop)
            value = properties[at + len(marker) : end if end >= 0 else stop]
            if value:
                return bytes(value)
        behind = at
    return b""


def drop(properties: bytes, name: bytes) -> bytes:
    """Return the property string without any pair of this name."""
    prefix = name + NAME_END
    if properties.find(prefix) < 0:
        return properties
    return VALUE_END.join(pair for pair in properties.split(VALUE_END) if not pair.startswith(prefix))


def append(properties: bytes, pair: bytes) -> bytes:
    """Return the property string with `pair` (name, 0x01, value) appended, after a separator if necessary."""
    return properties + pair if not properties or properties[-1] == 2 else properties + VALUE_END + pair


def put(properties: bytes, name: bytes, value: bytes) -> bytes:
    """Return the property string with a pair appended, and without all earlier pairs of this name."""
    return append(drop(properties, name), name + NAME_END + value)


def index_keys(properties: bytes) -> list[bytes]:
    """Return the keys by which a message is indexed: its unique key, then each key in its property KEYS."""
    unique = value_of(properties, b"UNIQ_KEY")
    return [key for key in (unique, *value_of(properties, b"KEYS").split(b" ")) if key]


_MAX_CACHED_TAG_BYTES = 128  # Maximum length of a tag whose hash is cached, in bytes


def stored_tags_code(properties: bytes) -> int:
    """Return the tags code that the consume queue stores for these properties: Java's hash of TAGS, or 0."""
    tags = value_of(properties, b"TAGS")
    if len(tags) > _MAX_CACHED_TAG_BYTES:
        return java_hash(tags.decode("utf-8", "replace"))
    return _short_tags_code(tags) if tags else 0


@lru_cache(maxsize=10_000)
def _short_tags_code(tags: bytes) -> int:
    return java_hash(tags.decode("utf-8", "replace"))


# -- Java's string hash


# The number of UTF-16 units that are hashed between two reductions of the value modulo 2**32. Each reduction
# takes time, but without reductions the value would become a large integer, and hashing would be slow.
_UNREDUCED = 64


def java_hash(text: str) -> int:
    """Return Java's String.hashCode, a signed 32-bit number: h = 31 h + u over all UTF-16 units u."""
    units: bytes | tuple[int, ...]
    if text.isascii():
        units = text.encode("ascii")
    else:
        data = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(data) // 2}H", data)
    value = 0
    for unit in units[:_UNREDUCED]:
        value = 31 * value + unit
    for at in range(_UNREDUCED, len(units), _UNREDUCED):
        value &= 0xFFFFFFFF
        for unit in units[at : at + _UNREDUCED]:
            value = 31 * value + unit
    value &= 0xFFFFFFFF
    return value - 0x1_0000_0000 if value >= 0x8000_0000 else value


def tags_code(tags: str | None) -> int:
    """Return the tags code that the consume queue stores for a tag: its hash, or 0 if there is no tag."""
    return java_hash(tags) if tags else 0


def index_hash(text: str) -> int:
    """Return the hash of an index key: the absolute value of Java's hash, or 0 for -2**31."""
    value = abs(java_hash(text))
    return 0 if value == 0x8000_0000 else value
