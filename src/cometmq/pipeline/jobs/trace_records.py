"""Conversion of trace messages to rows.

A readable trace record has one row for each message that it names. An unreadable record has one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa

from cometmq.errors import BodyError
from cometmq.protocol.codes import MAX_GROUP_LENGTH, is_legal_name
from cometmq.protocol.record.arrow import MAX_MS, MAX_RAW_BYTES
from cometmq.protocol.traces import AnyTrace, EndTransaction, Pub, Recall, SubAfter, SubBefore, decode_trace

_END = b"\x02"
_BATCH_ROWS = 5000
_BATCH_RAW = 8 << 20  # Maximum characters of the column `raw` in a batch; it holds unreadable records
_LONGEST = 1024  # Maximum characters of a name or an id; RocketMQ's own have at most 255
_MOST_IDS = 10_000  # Maximum message ids in a trace record. Java clients write one record per message batch.

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),  # Kind of the trace record, or "bad"
        # Time in the trace record, by the client's clock. If it has none, the trace message's store time.
        ("timestamp_ms", pa.int64()),
        ("stored_ms", pa.int64()),  # Store time of the trace message
        ("region", pa.string()),
        ("group", pa.string()),
        ("topic", pa.string()),
        ("msg_id", pa.string()),
        ("part", pa.int32()),  # Index of the message in its batch; Java writes one record per batch
        ("request_id", pa.string()),
        ("cost_ms", pa.int64()),
        ("success", pa.bool_()),
        ("code", pa.int64()),  # Context code of a SubAfter record, or message type of a Pub record
        ("retries", pa.int64()),
        ("state", pa.string()),  # State of the transaction in an EndTransaction record
        ("from_check", pa.bool_()),
        # Position of the trace message: its broker, `queue_id` and `queue_offset`.
        ("broker_name", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("problem", pa.string()),  # Reason why a bad record cannot be read
        ("raw", pa.string()),
    ]
)
PLACE = ("broker_name", "queue_id", "queue_offset")
COLUMNS = (*PLACE, "store_timestamp", "body")
"""Columns of the trace messages that the job reads."""


def rows_of(body: bytes, stored_ms: int) -> Iterator[dict[str, Any]]:
    """Return the rows of a trace message without its position. An unreadable record is of kind `bad`."""
    start = 0
    while start < len(body):
        end = body.find(_END, start)
        end = len(body) if end < 0 else end
        line, start = body[start:end], end + 1
        if not line.strip():
            continue
        try:
            yield from _rows(decode_trace(line.decode("utf-8", "replace")), stored_ms)
        except BodyError as error:
            raw = line[:MAX_RAW_BYTES].decode("utf-8", "replace")
            yield {"kind": "bad", "timestamp_ms": stored_ms, "problem": str(error), "raw": raw}


def _rows(trace: AnyTrace, stored_ms: int) -> list[dict[str, Any]]:
    at = trace.timestamp_ms
    if at is None:
        at = stored_ms
    elif not 0 <= at <= MAX_MS:
        raise BodyError("trace", "a time of the years 1970 to 9998 is expected", "timestampMs")
    row: dict[str, Any] = {"kind": type(trace).__name__, "timestamp_ms": at, "group": trace.group}
    match trace:
        case SubAfter():
            row |= {"request_id": trace.request_id, "code": trace.context_code}
        case SubBefore():
            row |= {"request_id": trace.request_id, "retries": trace.retry_times, "region": trace.region}
        case Pub() | EndTransaction() | Recall():
            row |= {"topic": trace.topic, "region": trace.region}
    match trace:
        case Pub() | SubAfter():
            if not 0 <= trace.cost_ms <= MAX_MS:
                raise BodyError("trace", f"a cost of {trace.cost_ms} ms", "costMs")
            row |= {"cost_ms": trace.cost_ms, "success": trace.success}
        case Recall():
            row["success"] = trace.success
        case EndTransaction():
            row |= {"state": trace.state, "from_check": trace.from_check}
    if isinstance(trace, Pub):
        row["code"] = trace.message_type
    ids = trace.msg_id.split(",", _MOST_IDS)
    _check_names(trace.group, ids, row)
    return [row | {"msg_id": msg_id, "part": part} for part, msg_id in enumerate(ids)]


def _check_names(group: str | None, ids: list[str], row: dict[str, Any]) -> None:
    """Raise BodyError for invalid or too long texts and too many ids: any sender can write to the topic."""
    if group and not is_legal_name(group, MAX_GROUP_LENGTH):
        raise BodyError("trace", "the name of a group is expected", "groupName")
    if len(ids) > _MOST_IDS:
        raise BodyError("trace", f"more than {_MOST_IDS} ids in a record", "msgId")
    # Each id becomes a row with a copy of the record's names, so long names would take much memory.
    for text in (*row.values(), *ids):
        if isinstance(text, str) and len(text) > _LONGEST:
            raise BodyError("trace", f"a name or an id of {len(text)} characters, {_LONGEST} are possible")


def decoded(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Convert batches of trace messages (COLUMNS) to batches of trace records (SCHEMA), for `mapInArrow`."""
    rows: list[dict[str, Any]] = []
    raw = 0
    for batch in batches:
        for message in batch.to_pylist():
            stored: datetime = message["store_timestamp"]
            stored_ms = round(stored.timestamp() * 1000)
            place = {name: message[name] for name in PLACE} | {"stored_ms": stored_ms}
            for row in rows_of(message["body"] or b"", stored_ms):
                rows.append(row | place)
                raw += len(row.get("raw", ""))
                if len(rows) >= _BATCH_ROWS or raw >= _BATCH_RAW:
                    yield pa.RecordBatch.from_pylist(rows, SCHEMA)
                    rows, raw = [], 0
    if rows:
        yield pa.RecordBatch.from_pylist(rows, SCHEMA)
