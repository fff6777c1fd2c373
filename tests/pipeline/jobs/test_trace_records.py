from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from cometmq.pipeline.jobs.trace_records import SCHEMA, decoded, rows_of
from cometmq.protocol.record.arrow import MAX_RAW_BYTES

RECORDED = Path(__file__).parents[2] / "data" / "traces.json"
PUB = "Pub\x011000\x01r\x01g\x01T\x01{ids}\x01\x01\x01h\x015\x0130\x010\x01o\x01true\x02"


def line(*fields: object) -> str:
    return "\x01".join(map(str, fields)) + "\x02"


def test_each_message_of_a_batch_that_java_traces_in_one_record_has_a_row() -> None:
    rows = list(rows_of(PUB.format(ids="A,B").encode(), 7))
    assert [(row["msg_id"], row["part"], row["cost_ms"]) for row in rows] == [("A", 0, 30), ("B", 1, 30)]


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (line("SubBefore", 5, "r", "g", "q", "M", 2, "k"), {"kind": "SubBefore", "retries": 2, "group": "g"}),
        (line("SubAfter", "q", "M", 9, "false", "k", 4, 6, "g"), {"timestamp_ms": 6, "code": 4}),
        (line("SubAfter", "q", "M", 9, "true", "k"), {"timestamp_ms": 7, "group": None, "code": 0}),
        (line("Recall", 5, "r", "g", "T", "M", "true"), {"kind": "Recall", "topic": "T", "success": True}),
        (
            line("EndTransaction", 5, "r", "g", "T", "M", "", "", "h", 2, "t", "COMMIT_MESSAGE", "true"),
            {"state": "COMMIT_MESSAGE", "from_check": True},
        ),
        (line("SubBefore", 5, "r", "no group", "q", "M", 2, "k"), {"kind": "bad"}),
        (line("SubBefore", 5, "r", "g\n", "q", "M", 2, "k"), {"kind": "bad"}),
        (line("SubBefore", 5, "r", "g" * 256, "q", "M", 2, "k"), {"kind": "bad"}),
        (line("SubBefore", 5, "r", "", "q", "M", 2, "k"), {"kind": "SubBefore", "group": ""}),
        (line("Pub", 5, "r"), {"kind": "bad", "timestamp_ms": 7, "raw": "Pub\x015\x01r"}),
        ("nonsense", {"kind": "bad", "raw": "nonsense"}),
        (line("Recall", 5, "r", "g" * 2000, "T", "A,B", "true"), {"kind": "bad"}),
        (line("Recall", 5, "r", "g", "T", "A," + "B" * 2000, "true"), {"kind": "bad"}),
        (line("SubBefore", 10**15, "r", "g", "q", "M", 2, "k"), {"kind": "bad"}),
        (line("SubBefore", -1, "r", "g", "q", "M", 2, "k"), {"kind": "bad"}),
        (line("SubAfter", "q", "M", 10**16, "true", "k", 4, 6, "g"), {"kind": "bad"}),
        (line("SubAfter", "q", "M", -1, "true", "k", 4, 6, "g"), {"kind": "bad"}),
        (line("Recall", 5, "r", "g", "T", "," * 20_000, "true"), {"kind": "bad"}),
        ("x" * (MAX_RAW_BYTES + 9), {"kind": "bad", "raw": "x" * MAX_RAW_BYTES}),
    ],
)  # fmt: skip
def test_records_of_all_kinds(record: str, found: dict[str, object]) -> None:
    (row,) = rows_of(record.encode(), 7)
    assert row.items() >= found.items()


def test_bodies_that_java_wrote_have_no_bad_rows() -> None:
    texts = [text for text in _texts(json.loads(RECORDED.read_text())) if "\x02" in text]
    assert texts
    kinds = {row["kind"] for text in texts for row in rows_of(text.encode(), 7)}
    assert kinds >= {"Pub", "SubBefore", "SubAfter"}
    assert "bad" not in kinds


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in _texts(item)]


def test_large_bodies_give_several_batches_that_name_their_message() -> None:
    stored = datetime.fromtimestamp(3, UTC)
    bodies = [(PUB.format(ids="A") * 6000).encode(), b"", None, b"?"]
    places = {"broker_name": ["b"] * 4, "queue_id": [1] * 4, "queue_offset": [0, 1, 2, 3]}
    batch = pa.RecordBatch.from_pydict(places | {"store_timestamp": [stored] * 4, "body": bodies})
    found = list(decoded(iter([batch])))
    assert [each.num_rows for each in found] == [5000, 1001]
    assert found[0].schema == SCHEMA
    last = found[1].to_pylist()[-1]
    assert (last["kind"], last["queue_offset"], last["stored_ms"]) == ("bad", 3, 3000)


def test_batches_are_bounded_by_their_raw_text_too() -> None:
    stored = datetime.fromtimestamp(3, UTC)
    body = ("x" * MAX_RAW_BYTES + "\x02").encode() * 60
    places = {"broker_name": ["b"] * 4, "queue_id": [1] * 4, "queue_offset": [0, 1, 2, 3]}
    batch = pa.RecordBatch.from_pydict(places | {"store_timestamp": [stored] * 4, "body": [body] * 4})
    assert [each.num_rows for each in decoded(iter([batch]))] == [128, 112]
