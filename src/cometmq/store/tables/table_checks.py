"""The checks of the tables in `config/`.

JSON text usually stays valid if one bit flips. So a table is checked beyond its syntax: it must have the name
that belongs to the file, and values of the right types. Entries must repeat their own key. No key may occur
twice, and none may differ from a known key in a single bit. A flipped bit within a number, or within a name
that occurs once, cannot be detected.

CometMQ's own tables also contain a CRC-32 of their content (`crc`, 8 hex digits, over the text of everything
else). Files of older versions have no CRC and are accepted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from cometmq.errors import BodyError
from cometmq.protocol.bodies import (
    Body,
    ConsumerOffsetTable,
    DataVersion,
    DelayOffsetTable,
    SubscriptionGroupConfig,
    SubscriptionGroupTable,
    TopicConfig,
    TopicConfigTable,
)
from cometmq.protocol.json_body import empty
from cometmq.protocol.lenient import read_lenient

Table: TypeAlias = dict[str, Any]
TableRule: TypeAlias = Callable[[Table], Table]
"""A function that checks a table. It returns the table without its CRC, or raises ProtocolError."""

TOPICS = "topics.json"
GROUPS = "subscriptionGroup.json"
OFFSETS = "consumerOffset.json"
DELAYS = "delayOffset.json"
ENDS = "consumeQueueEnds.json"
MIN_OFFSETS = "queueMinOffsets.json"
DELETED = "deletedTopics.json"
TIMERS = "timers.json"
CUT = "logCut.json"
TIERED = "tieredSegments.json"

_FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")
_CRC = "crc"


class QueueEndTable(Body, forbid_unknown_fields=True):
    """The content of `consumeQueueEnds.json`."""

    log_end: int = -1
    queue_ends: dict[str, dict[int, int]] = empty(dict)
    segment_size: int = 0
    queue_file_size: int = 0
    index_file_size: int = 0


class MinOffsetTable(Body, forbid_unknown_fields=True):
    """The content of `queueMinOffsets.json`."""

    min_offsets: dict[str, dict[int, int]] = empty(dict)


class DeletedTopicTable(Body, forbid_unknown_fields=True):
    """The content of `deletedTopics.json`."""

    deleted_topics: dict[str, int] = empty(dict)


class TimerTable(Body, forbid_unknown_fields=True):
    """The content of `timers.json`: the progress of timer messages (docs/store.md, Timer messages)."""

    queue_offset: int = 0
    delivered_ms: int = -1
    first_position: int = 0
    log_position: int = 0
    waiting: dict[str, int] = empty(dict)
    counted_offset: int = -1
    counted_position: int = -1


class LogCutTable(Body, forbid_unknown_fields=True):
    """The content of `logCut.json`: the intended end of the log, and the latest store time before it."""

    log_end: int = -1
    stored_ms: int = 0


class TieredSegment(NamedTuple):
    """A segment in the object store. `crc` is the CRC-32 of the object with the CRCs of its blocks."""

    size: int
    crc: int
    modified_ms: int


class TieredSegmentTable(Body, forbid_unknown_fields=True):
    """The content of `tieredSegments.json`: the segments by first log position.

    `restoring` is True while the directory is restored from the object store.
    """

    store_id: str = ""
    segments: dict[int, TieredSegment] = empty(dict)
    restoring: bool = False


def read_table(text: bytes, rule: TableRule | None = None) -> Table:
    """Return the table in a text of standard JSON or fastjson's dialect. Raises ProtocolError."""
    try:
        plain = text.decode()
    except UnicodeDecodeError as error:
        raise BodyError("table", f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(plain, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        value = read_lenient(plain, unique=True)
    if not isinstance(value, dict):
        raise BodyError("table", "it is not a JSON object")
    return rule(value) if rule is not None else value


def _unique(pairs: list[tuple[str, Any]]) -> Table:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise BodyError("table", "a key occurs twice in one object")
    return found


def seal(table: Table) -> Table:
    """Return the table with the CRC of its content added."""
    return {**table, _CRC: _crc_of(table)}


def _crc_of(table: Table) -> str:
    return f"{zlib.crc32(render(table).encode()):08x}"


def render(value: Any, level: int = 0) -> str:
    """Return the text of a table, or of a value in a table, in the style of Apache's broker.

    Each level is indented by one TAB. LF separates lines, and the last line has no LF. A map from numbers to
    numbers is on one line, with keys without quotes (docs/reference/storage.md, Tables).
    """
    if not isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False)
    if not value:
        return "{}" if isinstance(value, dict) else "[]"
    begin, end = "\n" + "\t" * (level + 1), "\n" + "\t" * level
    inner = [render(each, level + 1) for each in (value.values() if isinstance(value, dict) else value)]
    if not isinstance(value, dict):
        return "[" + begin + ("," + begin).join(inner) + end + "]"
    if all(isinstance(key, int) for key in value):
        return "{" + ",".join(f"{key}:{text}" for key, text in zip(value, inner, strict=True)) + end + "}"
    names = (json.dumps(str(key), ensure_ascii=False) for key in value)
    pairs = (f"{name}:{text}" for name, text in zip(names, inner, strict=True))
    return "{" + begin + ("," + begin).join(pairs) + end + "}"


# -- rules for single files


def _holds(name: str, kind: type[Body], check: Callable[[Any], None]) -> TableRule:
    """Return the check of a table of Apache's broker with the field `name`. Unknown fields are accepted."""
    known = (*kind.__struct_encode_fields__, "dataVersion")

    def rule(table: Table) -> Table:
        if not table:
            return table
        _no_neighbours(table, known, "")
        if not isinstance(table.get(name), dict):
            raise BodyError(kind.__name__, "the table is missing in the file", name)
        _no_neighbours(table.get("dataVersion"), DataVersion.__struct_encode_fields__, "dataVersion")
        check(table[name])
        kind.from_plain(table)
        return table

    return rule


def _entries(kind: type[Body], name_field: str) -> Callable[[Table], None]:
    """Return the check of a table's entries. The field `name_field`, if present, must equal the key."""
    fields = kind.__struct_encode_fields__

    def check(entries: Table) -> None:
        for name, entry in entries.items():
            _no_neighbours(entry, fields, name)
            if not isinstance(entry, dict):
                raise BodyError(kind.__name__, "it is not an object", name)
            if entry.get(name_field, name) != name:
                raise BodyError(kind.__name__, f"the name in the entry differs: {entry[name_field]!r}", name)
            filter_type = entry.get("topicFilterType")
            if isinstance(filter_type, str) and filter_type not in _FILTER_TYPES:
                raise BodyError(kind.__name__, f"{filter_type!r} is not a filter type", name)

    return check


def _topic_and_group(entries: Table) -> None:
    for key in entries:
        if "@" not in key:
            raise BodyError("ConsumerOffsetTable", "it is not topic@group", key)


def _no_neighbours(value: object, known: Iterable[str], place: str) -> None:
    """Refuse a key that differs from a known key in a single bit.

    The refused key is probably the known key, damaged. If it were accepted, the known key would silently get
    its default value.
    """
    if not isinstance(value, dict):
        return
    for key in value:
        if key in known:
            continue
        for name in known:
            if _bits_apart(str(key), name) == 1:
                raise BodyError("table", f"{key!r} differs from {name!r} in one bit", place)


def _bits_apart(one: str, other: str) -> int:
    """Return the number of bits in which two texts differ, or a large number if their lengths differ."""
    a, b = one.encode(), other.encode()
    if len(a) != len(b):
        return 8 * max(len(a), len(b))
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count()


def _own(kind: type[Body]) -> TableRule:
    """Return the check of one of CometMQ's own tables: known fields only, and the CRC if there is one."""

    def rule(table: Table) -> Table:
        content = {key: value for key, value in table.items() if key != _CRC}
        if _CRC in table and table[_CRC] != _crc_of(content):
            raise BodyError(kind.__name__, "the content does not match its CRC")
        kind.from_plain(content)
        return content

    return rule


TABLE_RULES: dict[str, TableRule] = {
    TOPICS: _holds("topicConfigTable", TopicConfigTable, _entries(TopicConfig, "topicName")),
    GROUPS: _holds(
        "subscriptionGroupTable", SubscriptionGroupTable, _entries(SubscriptionGroupConfig, "groupName")
    ),
    OFFSETS: _holds("offsetTable", ConsumerOffsetTable, _topic_and_group),
    DELAYS: _holds("offsetTable", DelayOffsetTable, lambda _levels: None),
    ENDS: _own(QueueEndTable),
    MIN_OFFSETS: _own(MinOffsetTable),
    DELETED: _own(DeletedTopicTable),
    TIMERS: _own(TimerTable),
    CUT: _own(LogCutTable),
    TIERED: _own(TieredSegmentTable),
}
"""The function that checks each table in `config/`, by file name."""
SEALED = frozenset({ENDS, MIN_OFFSETS, DELETED, TIMERS, CUT, TIERED})
