"""The parser of fastjson's dialect accepts all of JSON and fastjson's extensions, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.cutting import never_escapes, truncations

from cometmq.errors import BodyError
from cometmq.protocol.lenient import MAX_DEPTH, LenientError, loads, read_lenient

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)


@settings(max_examples=100)
@given(values, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_standard_json_is_read_as_python_reads_it(value: Any, ascii_only: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)

    assert read_lenient(text) == value
    assert read_lenient(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{0:"a",1:"b"}', {"0": "a", "1": "b"}),
        ("{-5:1}", {"-5": 1}),
        ("{'a':'it''s'}".replace("''", "\\'"), {"a": "it's"}),
        ("{a_b$c:1,d.e:2,%RETRY%g:3}", {"a_b$c": 1, "d.e": 2, "%RETRY%g": 3}),
        ("[1,,2,]", [1, 2]),
        ("{,'a':1,,'b':2,}", {"a": 1, "b": 2}),
        ("/* one */ {a: // two\n 1} /* three */", {"a": 1}),
        ("\ufeff{}", {}),
        ("undefined", None),
        ("NaN", None),
        ("[5L,6S,7B,1.5D,2F]", [5, 6, 7, 1.5, 2]),
        ("[+5,-5,.5,5.,1e3,1E-2]", [5, -5, 0.5, 5.0, 1000.0, 0.01]),
        ("Set[1,2]", [1, 2]),
        ("TreeSet['a']", ["a"]),
        ('"a\nb\tc"', "a\nb\tc"),
        (r'"\x41\u0042\n\t\/\\\"\0\v"', 'AB\n\t/\\"\0\v'),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r'"x\ud83d"', "x\ufffd"),
        ("{a:1,a:2}", {"a": 2}),
        ("9" * 100, int("9" * 100)),
    ],
)
def test_what_fastjson_adds(text: str, value: Any) -> None:
    assert read_lenient(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "}", "[", "]", "{}}", "[]]", "{]", "[}", "{a}", "{a:}", "{a:1", "{:1}", '{"a" 1}',
        "[1 2]", "{a:1 b:2}", "abc", "tru", "'a", '"a', '"\\', '"\\u12"', '"\\q"', "-", "+", ".",
        "1.2.3", "0x10", "1e", "--1", "/*", "// x", "{a:1}x", "[1]//y\n2", "Set", "Set{}", ",", ":",
        "9" * 401, "1" * 100_000, "{[1]:2}", "{{{a:1}:2}:3}",
    ],
)  # fmt: skip
def test_what_is_refused(text: str) -> None:
    with pytest.raises(LenientError, match="at character"):
        read_lenient(text)


@pytest.mark.parametrize("opening", ["[", '{"a":', "{a:[", "{{a:", "Set["])
def test_depth(opening: str) -> None:
    with pytest.raises(LenientError, match=r"deeper than 64|contains an object as a key"):
        read_lenient(opening * 100_000)


def test_keys_within_keys_do_not_grow() -> None:
    # Nested objects as text would double the quotes at each level.
    with pytest.raises(LenientError, match="contains an object as a key"):
        read_lenient("{" * 60 + "a:1" + "}:1" * 59 + "}")


def test_depth_at_the_limit() -> None:
    assert read_lenient("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0][0] is not None
    with pytest.raises(LenientError):
        read_lenient("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_every_cut_of_an_object_is_refused() -> None:
    data = b"{{'topic':\"T\\u0041\",queueId:0}:{offset:5,tags:['a',null,true]},0:1.5}"

    assert never_escapes(read_lenient, truncations(data)) == (0, len(data))
    assert len(read_lenient(data)) == 2


@settings(max_examples=200)
@given(st.text(alphabet="{}[]:,'\"\\aul0123.eE-+/* \n\ufeff"))
def test_any_text_is_read_or_refused(text: str) -> None:
    never_escapes(lambda data: read_lenient(data.decode()), iter([text.encode()]))


def test_loads_says_what_it_was_reading() -> None:
    with pytest.raises(BodyError, match=r"topics\.json: expected a value at character 3"):
        loads(b"{a:x}", "topics.json")
