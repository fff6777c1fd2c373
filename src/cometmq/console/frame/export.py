"""Messages as files: JSON lines, or CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

import msgspec

from cometmq.admin import DeadLetterView

COLUMNS = (
    "topic", "originalTopic", "msgId", "offsetMsgId", "originMsgId", "tags", "keys", "bornHost",
    "bornTimestamp", "storeTimestamp", "reconsumeTimes", "resendTimes", "properties", "body", "bodyEncoding",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet takes a cell that begins so as a formula, which can send data elsewhere."""


def json_lines(letters: Iterable[DeadLetterView]) -> bytes:
    """One object a line, with all fields."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in letters)


def csv_file(letters: Iterable[DeadLetterView]) -> bytes:
    """A head and a row for each; times in ms, properties as JSON. Text that a spreadsheet would calculate is
    led by an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for each in letters:
        row = (
            each.topic, each.original_topic, each.msg_id, each.offset_msg_id, each.origin_msg_id, each.tags,
            " ".join(each.keys), each.born_host, each.born_timestamp, each.store_timestamp,
            each.reconsume_times, each.resend_times, msgspec.json.encode(each.properties).decode(), each.body,
            each.body_encoding,
        )  # fmt: skip
        writer.writerow([harmless(cell) for cell in row])
    return file.getvalue().encode("utf-8", "replace")


def harmless(cell: str | int | None) -> str | int:
    """A cell that no spreadsheet calculates."""
    if not isinstance(cell, str):
        return "" if cell is None else cell
    cell = cell.replace("\0", "\N{REPLACEMENT CHARACTER}")
    return f"'{cell}" if cell.lstrip(" \v\f\ufeff").startswith(_FORMULA) else cell
