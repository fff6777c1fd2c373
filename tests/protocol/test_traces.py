"""Trace records, compared with those of Apache's encoders (tests/data/traces.json)."""

from __future__ import annotations

import contextlib
import json
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.cutting import mutations, never_escapes, truncations

from cometmq.errors import BodyError
from cometmq.protocol.traces import (
    AnyTrace,
    Pub,
    SubAfter,
    SubBefore,
    decode_trace,
    encode_trace,
    traces_about,
)

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "traces.json").read_text())
RECORDS = [(msgspec.convert(row["trace"], AnyTrace), row["text"]) for row in GOLDEN]
PUB, PUB_TEXT = RECORDS[0]

int64 = st.integers(-(2**63), 2**63 - 1)
words = st.text(st.characters(exclude_characters="\x01\x02"), max_size=8).filter(lambda text: text != "null")
TRACES = st.one_of(
    *[
        st.builds(
            kind,
            **{
                field.name: {int: int64, bool: st.booleans(), str: words}.get(
                    field.type, st.none() | (int64 if field.type == int | None else words)
                )
                for field in msgspec.structs.fields(kind)
            },
        )
        for kind in AnyTrace.__args__
    ]
)


def about(body: str | bytes, msg_id: str) -> tuple[list[AnyTrace], list[str]]:
    unreadable: list[str] = []
    found = traces_about(body if isinstance(body, bytes) else body.encode(), msg_id, unreadable)
    return list(found), unreadable


def test_the_golden_records_are_of_every_kind() -> None:
    assert {type(trace) for trace, _ in RECORDS} == set(AnyTrace.__args__)


@pytest.mark.parametrize(("trace", "text"), RECORDS)
def test_a_record_is_written_and_read_as_by_apache(trace: AnyTrace, text: str) -> None:
    assert encode_trace(trace) == text
    assert decode_trace(text.removesuffix("\x02")) == trace


@given(TRACES)
def test_what_is_written_is_read_again(trace: AnyTrace) -> None:
    text = encode_trace(trace)

    assert text.count("\x02") == 1
    assert decode_trace(text.removesuffix("\x02")) == trace


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_separator_in_a_field_makes_no_other_record(tags: str, region: str) -> None:
    assert isinstance(PUB, Pub)
    text = encode_trace(msgspec.structs.replace(PUB, tags=f"\x02{tags}", region=f"{region}\x01"))

    read = decode_trace(text.removesuffix("\x02"))
    assert isinstance(read, Pub)
    assert (text.count("\x01"), text.count("\x02")) == (13, 1)
    assert read.msg_id == PUB.msg_id


def test_older_and_newer_forms_are_read() -> None:
    assert isinstance(PUB, Pub)
    parts = PUB_TEXT.removesuffix("\x02").split("\x01")
    after = ["SubAfter", "request", "id", "7", "TRUE", "k"]
    short = SubAfter(
        request_id="request", msg_id="id", cost_ms=7, success=True, keys="k", context_code=0
    )  # fmt: skip
    replaced = msgspec.structs.replace
    for written, read in (
        ([*parts[:12], "true"], replaced(PUB, offset_msg_id=None)),
        ([*parts, "10.0.0.1"], replaced(PUB, client_host="10.0.0.1")),
        ([*parts, "10.0.0.1", "more", "still more"], replaced(PUB, client_host="10.0.0.1")),
        ([*parts[:11], "9", *parts[12:]], replaced(PUB, message_type=9)),
        (after, short),
        ([*after, "4"], replaced(short, context_code=4)),
        ([*after, "4", ""], replaced(short, context_code=4)),  # 5.x on the cloud channel
    ):
        assert decode_trace("\x01".join(written)) == read, written


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "type: unknown kind ''"),
        ("Sub", "type: unknown kind 'Sub'"),
        ("Pub\x011", "a record of Pub has 1 instead of 13 fields"),
        (PUB_TEXT.replace("1795172444873", "soon"), "timestampMs: 'soon' is not a 64-bit number"),
        (
            PUB_TEXT.replace("1795172444873", "9" * 19),
            "timestampMs: '9999999999999999999' is not a 64-bit number",
        ),
        (PUB_TEXT.replace("1795172444873", "9" * 5000), "is not a 64-bit number"),
        (PUB_TEXT.replace("1795172444873", "\uff11"), "is not a 64-bit number"),
        (PUB_TEXT.replace("1795172444873", "1_0"), "is not a 64-bit number"),
    ],
)
def test_what_is_no_record_is_refused_with_the_field(text: str, problem: str) -> None:
    with pytest.raises(BodyError, match=problem.replace("timestampMs", "timestamp_ms")):
        decode_trace(text)


def test_broken_records_raise_nothing_else() -> None:
    for _, text in RECORDS:
        data = text.encode()
        never_escapes(lambda part: about(part, "7F"), chain(truncations(data), mutations(data)))


@given(st.text(max_size=40))
def test_any_text_is_a_record_or_refused(text: str) -> None:
    for kind in ("", "Pub", "SubBefore", "SubAfter", "EndTransaction", "Recall"):
        with contextlib.suppress(BodyError):
            decode_trace(f"{kind}\x01{text}")


def test_the_records_about_a_message_are_found_among_others() -> None:
    assert isinstance(PUB, Pub)
    before = SubBefore(
        timestamp_ms=1, region=None, group="g", request_id="r", msg_id="ID-2", retry_times=0, keys=PUB.msg_id
    )
    of_a_batch = msgspec.structs.replace(PUB, msg_id=f"ID-3,{PUB.msg_id}")
    body = "".join(map(encode_trace, [PUB, before, of_a_batch]))

    assert about(body, PUB.msg_id) == ([PUB, of_a_batch], [])
    assert about(body, "ID-2") == ([before], [])
    assert about(body.removesuffix("\x02"), "ID-3") == ([of_a_batch], [])
    assert about(body, "ID") == ([], [])
    assert about(body, "") == ([], [])


def test_a_record_that_cannot_be_read_hides_no_other() -> None:
    assert isinstance(PUB, Pub)
    bad = PUB_TEXT.replace("1795172444873", "x")
    other = PUB_TEXT.replace(PUB.msg_id, "another").replace("1795172444873", "x")

    found, unreadable = about(other + bad + PUB_TEXT, PUB.msg_id)

    assert found == [PUB]
    assert unreadable == ["trace: timestamp_ms: 'x' is not a 64-bit number"]


@pytest.mark.parametrize("piece", [b"ID", b"ID\x02", b"Pub\x01ID\x01"])
def test_a_hostile_body_takes_no_long_time(piece: bytes) -> None:
    about(piece * (500_000 // len(piece)), "ID")
