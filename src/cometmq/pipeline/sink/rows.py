"""Conversion of a DataFrame's rows to messages: the meaning of columns, and their values as bytes.

The columns are in docs/pipeline.md, Writing. Other columns of the source (queue_id, store_timestamp …) are
accepted and ignored, so rows of the source can be written again.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from cometmq.errors import ConfigError, MessageIllegal
from cometmq.message import check_topic_name
from cometmq.pipeline.base.errors import SinkRowError
from cometmq.pipeline.base.options import WriteOptions
from cometmq.protocol.codes import MAX_FRAME_LENGTH, UNSENDABLE_TOPICS
from cometmq.protocol.properties.values import MAX_PROPERTIES_BYTES
from cometmq.protocol.record.arrow import COLUMNS
from cometmq.text import is_utf8

MOST_BYTES = MAX_FRAME_LENGTH - 256 * 1024
"""Maximum size of body and properties, in bytes.

The maximum is smaller than a frame, because escapes in the header's JSON make the frame longer. Brokers have
a lower limit (`maxMessageSize`) and report messages above it; if a frame is too long, the broker only closes
the connection.
"""
_TEXT = (StringType,)
_NUMBER = (IntegerType, LongType, ShortType)
_COLUMNS: dict[str, tuple[type, ...]] = {
    "body": (BinaryType, StringType),
    **dict.fromkeys(("topic", "tags", "keys"), _TEXT),
    "properties": (MapType,),
    **dict.fromkeys(("flag", "delay_level"), _NUMBER),
    **dict.fromkeys(("sharding_key", "msg_id"), _TEXT),
}
# Properties that brokers and clients set for a stored message. On a new message they would be wrong, so they
# are not copied.
_NOT_COPIED = frozenset((
    "CLUSTER", "WAIT", "MSG_REGION", "TRACE_ON", "UNIQ_KEY", "MIN_OFFSET", "MAX_OFFSET", "DELAY",
    "REAL_TOPIC", "REAL_QID", "TRAN_MSG", "PGROUP", "TRAN_PREPARED_QUEUE_OFFSET", "__transactionId__",
    "TRANSACTION_CHECK_TIMES", "RECONSUME_TIME", "MAX_RECONSUME_TIMES", "RETRY_TOPIC", "ORIGIN_MESSAGE_ID",
    "CONSUME_START_TIME", "POP_CK", "INNER_NUM", "INNER_BASE", "__CRC32#",
))  # fmt: skip


_FIELDS = {"UNIQ_KEY": "msg_id", "KEYS": "keys", "TAGS": "tags"}
"""The properties that have a column of their own, each with the column's name."""


class RowMessage(NamedTuple):
    """A message ready to be sent. `properties` is the encoded string, without the delay level."""

    topic: str
    body: bytes
    properties: bytes
    flag: int
    delay_level: int
    sharding_key: str | None


def check_columns(schema: StructType, options: WriteOptions) -> None:
    """Raise ConfigError if messages cannot be made from the columns of a DataFrame with this schema."""
    if {"body", "value"} <= set(schema.names):
        raise ConfigError("columns", "body, value", "one of the two: both mean the body of the message")
    names = {("body" if field.name == "value" else field.name): field for field in schema.fields}
    if len(names) < len(schema.names):
        raise ConfigError("columns", ", ".join(schema.names), "each name once")
    if "body" not in names:
        raise ConfigError("columns", ", ".join(schema.names), "a column body (or value), binary or string")
    if "topic" not in names and options.topic is None:
        raise ConfigError("topic", "", "a topic: the option, or a column of that name")
    for name, field in names.items():
        if name not in _COLUMNS:
            if name in COLUMNS:
                continue
            near = difflib.get_close_matches(name, _COLUMNS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError("columns", name, f"columns of: {', '.join(_COLUMNS)}{hint}")
        if not _fits(field.dataType, _COLUMNS[name]):
            expected = " or ".join(kind.__name__.removesuffix("Type").lower() for kind in _COLUMNS[name])
            expected = expected.replace("map", "map<string,string>")
            raise ConfigError("columns", f"{name} {field.dataType.simpleString()}", f"{name} {expected}")


def _fits(kind: DataType, allowed: tuple[type, ...]) -> bool:
    texts = (kind.keyType, kind.valueType) if isinstance(kind, MapType) else ()
    return isinstance(kind, allowed) and all(isinstance(each, StringType) for each in texts)


def messages_of(
    batch: pa.RecordBatch,
    options: WriteOptions,
    first_row: int,
    make_id: Callable[[int], str],
    on_bad: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[RowMessage]:
    """Return the messages of a batch. `first_row` is the number of the batch's first row in its partition.

    An invalid row is passed to `on_bad` (with the columns of bad_rows.SCHEMA). Without `on_bad`, an invalid
    row raises SinkRowError.
    """
    columns = {("body" if name == "value" else name): batch.column(name) for name in batch.schema.names}
    columns["body"] = columns["body"].cast(pa.large_binary())
    if options.topic:
        columns.pop("topic", None)
    count = batch.num_rows
    nothing = [None] * count
    odd = [name for name in _COLUMNS if name in columns and not is_valid(columns[name])]
    taken = [_values(columns[name], name in odd) if name in columns else nothing for name in _COLUMNS]
    for row, values in enumerate(zip(*taken, strict=True), first_row):
        body, topic, tags, keys, properties, flag, delay, sharding, msg_id = values
        topic, msg_id = options.topic or topic, msg_id or make_id(row)
        try:
            if not body:
                raise SinkRowError(row, "body", "is null" if body is None else "is empty")
            if odd:
                _check_utf8(row, zip(_COLUMNS, values, strict=True))
            _check_properties(row, properties or ())
            message = message_of(
                row, topic, body, msg_id,
                tags=tags, keys=keys, properties=properties, flag=flag, delay_level=delay,
                sharding_key=sharding,
            )  # fmt: skip
        except SinkRowError as error:
            if on_bad is None:
                raise
            given = dict(zip(_COLUMNS, values, strict=True)) | {"topic": topic, "msg_id": msg_id}
            reason = {"field": error.field, "problem": error.problem}
            on_bad({name: _mended(value) for name, value in given.items()} | reason)
        else:
            yield message


def is_valid(column: pa.Array) -> bool:
    """Return whether a column's strings are valid UTF-8: Spark may have cast them from binary."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _values(column: pa.Array, odd: bool) -> list[Any]:
    """Return the values as Python objects. If `odd`, bytes that are not UTF-8 become lone surrogates."""
    if odd:
        kind = pa.map_(pa.binary(), pa.binary()) if pa.types.is_map(column.type) else pa.large_binary()
        return [_decoded(value) for value in column.cast(kind).to_pylist()]
    values: list[Any] = column.to_pylist()
    return values


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    return value and [tuple(map(_decoded, pair)) for pair in value]


def _mended(value: Any) -> Any:
    """Return a value for the table of bad rows: bytes that are not UTF-8 are written as `\\xff`."""
    if isinstance(value, str) and not is_utf8(value):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return [tuple(map(_mended, pair)) for pair in value] if isinstance(value, list) else value


def _check_utf8(row: int, values: Iterable[tuple[str, Any]]) -> None:
    for field, value in values:
        texts = chain.from_iterable(value) if isinstance(value, list) else (value,)
        if not all(is_utf8(text) for text in texts if isinstance(text, str)):
            raise SinkRowError(row, field, "is not UTF-8")


def _check_properties(row: int, properties: Iterable[tuple[str, str | None]]) -> None:
    """Raise SinkRowError for a property that a reader of the message could not decode."""
    for name, value in properties:
        if not name:
            raise SinkRowError(row, "properties", "a name is empty")
        if not value and name not in _NOT_COPIED:
            raise SinkRowError(
                row, "properties", f"the value of {name} is {'null' if value is None else 'empty'}"
            )


def message_of(
    row: int,
    topic: str | None,
    body: bytes,
    msg_id: str,
    *,
    tags: str | None = None,
    keys: str | None = None,
    properties: Iterable[tuple[str, str | None]] | None = None,
    flag: int | None = None,
    delay_level: int | None = None,
    sharding_key: str | None = None,
) -> RowMessage:
    """Return a message ready to be sent. Raises SinkRowError for a message that every broker would refuse."""
    encoded = _encode(row, msg_id, tags, keys, properties)
    _check(row, topic, len(body) + len(encoded), flag or 0, delay_level or 0)
    return RowMessage(topic or "", body, encoded, flag or 0, delay_level or 0, sharding_key)


def _check(row: int, topic: str | None, size: int, flag: int, delay: int) -> None:
    if not topic:
        raise SinkRowError(row, "topic", "is null")
    if problem := topic_problem(topic):
        raise SinkRowError(row, "topic", problem)
    if size > MOST_BYTES:
        raise SinkRowError(row, "body", f"{size} bytes with the properties, more than a request can carry")
    for name, value in (("flag", flag), ("delay_level", delay)):
        if not -(2**31) <= value < 2**31:
            raise SinkRowError(row, name, f"{value} does not fit in 32 bits")
    if delay < 0:
        raise SinkRowError(row, "delay_level", f"{delay} is negative")


@lru_cache(maxsize=1000)
def topic_problem(topic: str) -> str:
    """Return why brokers refuse messages for a topic of this name, or "" for a valid name."""
    try:
        check_topic_name(topic)
    except MessageIllegal as error:
        return error.problem
    return f"{topic} belongs to the brokers" if topic in UNSENDABLE_TOPICS else ""


def _encode(
    row: int,
    msg_id: str,
    tags: str | None,
    keys: str | None,
    properties: Iterable[tuple[str, str | None]] | None,
) -> bytes:
    pairs = {"UNIQ_KEY": msg_id, "WAIT": "true"}
    if properties:
        # Arrow represents a map as a list of pairs. Properties without a value are left out, because readers
        # ignore them.
        pairs |= {name: value for name, value in properties if value and name and name not in _NOT_COPIED}
    if keys:
        pairs["KEYS"] = keys
    if tags:
        pairs["TAGS"] = tags
    text = "\x02".join([f"{name}\x01{value}" for name, value in pairs.items()])
    if text.count("\x01") != len(pairs) or text.count("\x02") != len(pairs) - 1:
        for name, value in pairs.items():
            if not {"\x01", "\x02"}.isdisjoint(name + value):
                problem = f"the name or value of {name!r} contains the character \\x01 or \\x02"
                raise SinkRowError(row, _FIELDS.get(name, "properties"), problem)
    encoded = text.encode()
    if len(encoded) > MAX_PROPERTIES_BYTES:
        problem = f"{len(encoded)} bytes encoded, the limit is {MAX_PROPERTIES_BYTES}"
        raise SinkRowError(row, "properties", problem)
    return encoded
