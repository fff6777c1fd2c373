"""The attributes of topics and groups: their keys, and changes in 5.x's form `+key=value,-key`.

`retention.ms`, `retention.bytes`, `dedup.window.ms`, `dedup.key` and the rate limits exist only in CometMQ.
`message.type` is for 5.x clients: the gRPC endpoint refuses messages of other types. `lite.topic.expiration`
is for topics of the type LITE, and groups have attributes for lite topics. topics.json and
subscriptionGroup.json store keys and values in the same form as 5.x's broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cometmq.broker.base.config import MAX_RATE
from cometmq.errors import ConfigError
from cometmq.protocol import lite
from cometmq.protocol.bodies import TopicConfig
from cometmq.protocol.codes import MAX_TOPIC_LENGTH, is_legal_name
from cometmq.protocol.properties.values import KEYS, UNIQ_KEY, is_reserved
from cometmq.store import StoreConfig, TopicLimit

RETENTION_MS = "retention.ms"
RETENTION_BYTES = "retention.bytes"
DEDUP_WINDOW_MS = "dedup.window.ms"
DEDUP_KEY = "dedup.key"
MAX_DEDUP_WINDOW_MS = 86_400_000
_MAX_DEDUP_KEY_LENGTH = 127
MESSAGE_TYPES = ("UNSPECIFIED", "NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "LITE", "MIXED")
SEND, RECEIVE = "send", "receive"
UNITS = ("messages", "bytes")
RATES = tuple(f"{direction}.{unit}" for direction in (SEND, RECEIVE) for unit in UNITS)
"""The names of an account's rate limits."""
RATE = "rate."
OF_TOPICS, OF_GROUPS = (tuple(f"{RATE}{direction}.{unit}" for unit in UNITS) for direction in (SEND, RECEIVE))
"""The attributes of topics and of groups that set their rate limits."""
RATE_FORM = f"a whole number per second up to {MAX_RATE} (0: no limit)"
_KEYS = (
    RETENTION_MS, RETENTION_BYTES, *OF_TOPICS, DEDUP_WINDOW_MS, DEDUP_KEY, lite.MESSAGE_TYPE, lite.EXPIRATION,
)  # fmt: skip
_HOUR_MS = 3_600_000


def changed(present: Mapping[str, str] | None, text: str | None, store: StoreConfig) -> dict[str, str]:
    """Return a topic's attributes after a change in the form `+key=value,-key`. Raises ConfigError.

    The settings of the store limit how long messages can be read (retention.ms), and for how long the log on
    the disk has them, from which a start reads the keys of messages (dedup.window.ms).
    """
    result = dict(present or {})
    for part in (text or "").split(","):
        word = part.strip()
        if not word:
            continue
        key, equals, value = word[1:].partition("=")
        if word[0] == "+" and equals and key:
            _check(key, value, store)
            result[key] = value
        elif word[0] == "-" and key and not equals:
            _known(key, "")
            result.pop(key, None)
        else:
            raise ConfigError("attributes", word, "+key=value or -key, separated by commas")
    if DEDUP_WINDOW_MS in result and lite.is_lite_parent(result):
        raise ConfigError(DEDUP_WINDOW_MS, result[DEDUP_WINDOW_MS], "no attribute of a topic of type LITE")
    return result


def _known(key: str, value: str) -> None:
    if key not in _KEYS:
        raise ConfigError(key, value, f"an attribute that exists: {', '.join(_KEYS)}")


def _check(key: str, value: str, store: StoreConfig) -> None:
    _known(key, value)
    if key == lite.MESSAGE_TYPE:
        if value not in MESSAGE_TYPES:
            raise ConfigError(key, value, f"one of {', '.join(MESSAGE_TYPES)}")
        return
    if key == DEDUP_KEY:
        own = value not in (UNIQ_KEY, KEYS) and is_reserved(value)
        if own or len(value) > _MAX_DEDUP_KEY_LENGTH or not value.isprintable():
            raise ConfigError(key, value, f"{UNIQ_KEY}, {KEYS}, or the name of a user property")
        return
    if key in OF_TOPICS:
        _check_rate(key, value)
        return
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 19 else 0
    if key == DEDUP_WINDOW_MS:
        most = min(MAX_DEDUP_WINDOW_MS, store.local_reserved_time * _HOUR_MS)
        if not 0 < number <= most:
            raise ConfigError(key, value, f"milliseconds from 1 to {most}")
        return
    if key == lite.EXPIRATION:
        if value != "-1" and not 0 < number <= lite.MAX_EXPIRATION_MINUTES:
            raise ConfigError(key, value, f"-1, or minutes from 1 to {lite.MAX_EXPIRATION_MINUTES}")
        return
    if number <= 0:
        unit = "milliseconds" if key == RETENTION_MS else "bytes per queue"
        raise ConfigError(key, value, f"a whole number of {unit} above 0")
    most = store.longest_reserved_time
    if key == RETENTION_MS and number > most * _HOUR_MS:
        setting = "fileReservedTime" if most == store.file_reserved_time else "tieredReservedTime"
        raise ConfigError(
            key, value, f"at most {most * _HOUR_MS}: segments are deleted after "
            f"{setting}={most} hours, with the messages of all topics in them",
        )  # fmt: skip


class DedupRule(NamedTuple):
    """The property that holds the key of a message, and the window in ms in which a key is stored once."""

    name: bytes
    window_ms: int


def dedup_of(topic: TopicConfig) -> DedupRule | None:
    """Return how sends to a topic are deduplicated, or None if they are not."""
    window_ms = _number(topic.attributes, DEDUP_WINDOW_MS)
    if not window_ms or topic.topic_name.startswith("%") or lite.is_lite_parent(topic.attributes):
        return None
    return DedupRule((topic.attributes or {}).get(DEDUP_KEY, UNIQ_KEY).encode(), window_ms)


def check_windows(topics: Iterable[TopicConfig], store: StoreConfig) -> None:
    """Raise ConfigError if the log is on the disk for a shorter time than the dedup window of a topic.

    A start would then find only a part of the keys in the log, and duplicates of the others would be stored.
    """
    hours = store.local_reserved_time
    for topic in topics:
        rule = dedup_of(topic)
        if rule is not None and rule.window_ms > hours * _HOUR_MS:
            key = "fileReservedTime" if hours == store.file_reserved_time else "tieredLocalReservedTime"
            least = f"at least the {DEDUP_WINDOW_MS}={rule.window_ms} of topic {topic.topic_name}, in hours"
            raise ConfigError(key, str(hours), least)


def parse_rate(text: str | None) -> int | None:
    """Return the rate limit that a text stands for, or None if it is not a whole number up to MAX_RATE."""
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) <= 13):
        return None
    return number if (number := int(text)) <= MAX_RATE else None


def _check_rate(key: str, value: str) -> None:
    if parse_rate(value) is None:
        raise ConfigError(key, value, RATE_FORM)


def has_priorities(topic: TopicConfig) -> bool:
    """Return whether a topic is of type PRIORITY: its queue ids are the priorities of its messages."""
    return (topic.attributes or {}).get(lite.MESSAGE_TYPE) == "PRIORITY"


def of_group(present: Mapping[str, str] | None, given: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return a group's attributes after a request, whose keys begin with "+" or "-" as in 5.x's tools.

    A key without sign sets the attribute, as in the response of a broker. Raises ConfigError for an invalid
    value of a rate limit or an attribute of lite topics; other attributes are stored as they are.
    """
    if given is None:
        return None if present is None else dict(present)
    signed = any(key[:1] in ("+", "-") for key in given)
    result = dict(present or {}) if signed else {}
    for key, value in given.items():
        name = key.lstrip("+-")
        if key.startswith("-"):
            result.pop(name, None)
            continue
        if name == lite.SUB_MODEL and value not in lite.SUB_MODELS:
            raise ConfigError(name, value, f"one of {', '.join(lite.SUB_MODELS)}")
        if name == lite.CLIENT_QUOTA and not (value.isascii() and value.isdigit() and len(value) < 10):
            raise ConfigError(name, value, "a whole number of lite topics")
        if name == lite.BIND_TOPIC and not is_legal_name(value, MAX_TOPIC_LENGTH):
            raise ConfigError(name, value, "the name of a topic")
        if name in OF_GROUPS:
            _check_rate(name, value)
        result[name] = value
    return result


def limits(topics: Mapping[str, TopicConfig]) -> dict[str, TopicLimit]:
    """Return the retention limits of the topics that have any. Values that are not numbers are ignored."""
    found = {}
    for name, config in topics.items():
        age = _number(config.attributes, RETENTION_MS)
        size = _number(config.attributes, RETENTION_BYTES)
        if age is not None or size is not None:
            found[name] = TopicLimit(age, size)
    return found


def _number(attributes: Mapping[str, str] | None, key: str) -> int | None:
    value = (attributes or {}).get(key, "")
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else None
