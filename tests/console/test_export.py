"""Dead letters as files: whole, and harmless to a spreadsheet."""

from __future__ import annotations

import csv
import io
import json

import pytest

from cometmq.admin.dead_letters import view
from cometmq.console.frame.export import COLUMNS, csv_file, harmless, json_lines
from cometmq.message import MessageExt


def letter(body: bytes, **properties: str) -> MessageExt:
    return MessageExt("%DLQ%g", body, properties=properties, born_host="10.0.0.1:1", store_host="10.0.0.1:2")


def test_json_lines_hold_everything() -> None:
    lines = json_lines([view(letter(b"a\nb", k="v")), view(letter(b"\xff"))]).decode().splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["body"] for each in found] == ["a\nb", "/w=="]
    assert found[0]["properties"] == {"k": "v"}


def test_rows_stay_rows_whatever_is_in_them() -> None:
    hostile = letter(b'=cmd|"/c calc"!A1,\r\n+1', KEYS="@SUM(1)", TAGS="-2", RETRY_TOPIC="a\nb", x='","')
    rows = list(
        csv.reader(io.StringIO(csv_file([view(hostile), view(letter(b"plain"))]).decode(), newline=""))
    )
    assert rows[0] == list(COLUMNS)
    assert [len(row) for row in rows] == [len(COLUMNS)] * 3
    cells = dict(zip(COLUMNS, rows[1], strict=True))
    assert cells["body"] == '\'=cmd|"/c calc"!A1,\r\n+1'
    assert (cells["keys"], cells["tags"], cells["originalTopic"]) == ("'@SUM(1)", "'-2", "a\nb")
    assert json.loads(cells["properties"])["x"] == '","'
    assert dict(zip(COLUMNS, rows[2], strict=True))["body"] == "plain"


@pytest.mark.parametrize("cell", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", " =1", "\ufeff=1"])
def test_what_a_spreadsheet_would_calculate_is_led_by_an_apostrophe(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"


def test_other_cells_stay_as_they_are() -> None:
    assert [harmless(each) for each in ("a=1", "", 5, None)] == ["a=1", "", 5, ""]
    assert harmless("a\0b") == "a\N{REPLACEMENT CHARACTER}b"
