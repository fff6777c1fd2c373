"""Message bodies as people read them: any body is shown as text of limited length."""

from __future__ import annotations

import pytest

from cometmq.console.widgets.body import (
    MAX_HEX_BYTES,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MAX_TEXT_LENGTH,
    as_hex,
    as_json,
    as_text,
    is_text,
    preview,
)


def test_text() -> None:
    assert as_text("größer 价格".encode()) == "größer 价格"
    assert as_text(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"
    assert len(as_text("价".encode() * 10 * MAX_TEXT_LENGTH)) == MAX_TEXT_LENGTH
    assert is_text("价格\n\t".encode())
    assert is_text(b"")
    assert not is_text(b"\xff")
    assert not is_text(b"a\x00b")


def test_json_stands_as_it_was_sent() -> None:
    assert as_json(b'{"b":12345678901234567890123,"a":1e400,"a":[]}') == (
        '{\n  "b": 12345678901234567890123,\n  "a": 1e400,\n  "a": []\n}'
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no",
        b"{",
        b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1),
        b"[" * 100_000,
        b'"' + bytes(MAX_JSON_BYTES),
    ],
)
def test_what_is_no_json_or_too_much(body: bytes) -> None:
    assert as_json(body) is None


def test_json_that_grows_is_cut() -> None:
    grown = as_json(b"[" * 60 + b"1," * 50_000 + b"1" + b"]" * 60)
    assert grown is not None
    assert len(grown) == MAX_TEXT_LENGTH


def test_hex() -> None:
    assert as_hex(b"") == ""
    assert as_hex(b"AB<\x00" + bytes(14)).split("\n") == [
        "000000  41 42 3c 00 00 00 00 00 00 00 00 00 00 00 00 00  AB<.............",
        "000010  00 00" + " " * 44 + "..",
    ]
    assert len(as_hex(bytes(10 * MAX_HEX_BYTES)).split("\n")) == MAX_HEX_BYTES // 16


def test_a_preview_is_one_line() -> None:
    assert preview(b"a\nb\x00c") == "a b c"
    assert preview("价".encode() * 100) == "价" * 40
    assert preview(("a" + "价" * 100).encode()) == "a" + "价" * 39
    assert preview(b"\xff\xfe" * 20) == "ff fe " * 7 + "ff fe"
    assert preview(b"") == ""
